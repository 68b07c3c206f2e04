import os

# Read when jax is imported. Four devices let one CPU stand in for a mesh.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["JAX_NUM_CPU_DEVICES"] = "4"

import hypothesis

# The same examples on every run: a failure belongs to the change that shows it.
hypothesis.settings.register_profile("ci", derandomize=True, deadline=None, print_blob=True)
hypothesis.settings.load_profile("ci")
