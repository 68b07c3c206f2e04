import os
from pathlib import Path

# Read when jax is imported. Four devices let one CPU stand in for a mesh.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["JAX_NUM_CPU_DEVICES"] = "4"
# Compiled steps are kept between runs; a step is compiled again only when its program changes.
os.environ["JAX_COMPILATION_CACHE_DIR"] = str(Path(__file__).parent.parent / ".cache" / "jax")
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.3"

from collections.abc import Iterator

import hypothesis
import jaxtyping
import pytest

# The same examples on every run: a failure belongs to the change that shows it.
hypothesis.settings.register_profile("ci", derandomize=True, deadline=None, print_blob=True)
hypothesis.settings.load_profile("ci")


@pytest.fixture
def as_a_user() -> Iterator[None]:
    """Without the type checks of the tests, which would refuse wrong types first."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)
