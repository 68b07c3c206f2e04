import os

import pytest

# Read when jax is imported. Eight devices stand in for the H200s of a machine.
os.environ["JAX_NUM_CPU_DEVICES"] = "8"


def pytest_itemcollected(item: pytest.Item) -> None:
    item.add_marker("compiles")
