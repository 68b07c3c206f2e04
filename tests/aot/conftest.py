import os

# Read when jax is imported. Eight devices stand in for the H200s of a machine.
os.environ["JAX_NUM_CPU_DEVICES"] = "8"
