from collections.abc import Iterator

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.common import jax_internals
from scripts.aot.aot import compile_for_h200

ARGUMENTS = [jax.ShapeDtypeStruct((8,), jnp.float32)]


@pytest.fixture
def gpu_platform() -> Iterator[None]:
    jax.config.update("jax_platforms", "cuda")
    yield
    jax.config.update("jax_platforms", "cpu")


def test_no_plugin() -> None:
    """An environment without jax's CUDA plugin that gets an error from deep inside jax."""
    with pytest.raises(RuntimeError, match="make setup-aot"):
        compile_for_h200(jnp.sin, ARGUMENTS)


def test_other_jax(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another version of jax, whose private parts may mean something else."""
    monkeypatch.setattr(jax, "__version__", "0.99.0")
    with pytest.raises(RuntimeError, match=rf"0\.99\.0 .* {jax_internals.JAX_VERSION}"):
        compile_for_h200(jnp.sin, ARGUMENTS)


@pytest.mark.usefixtures("gpu_platform")
def test_platform() -> None:
    """A process that may use GPUs, where the plugin asks for libraries that nobody needs here."""
    with pytest.raises(RuntimeError, match="JAX_PLATFORMS"):
        compile_for_h200(jnp.sin, ARGUMENTS)


@pytest.mark.parametrize("more", [{"donate": [0]}, {"out_shardings": 1}])
def test_jitted_twice(more: dict) -> None:
    """Donation or shardings that would be ignored, as the function is jitted already."""
    with pytest.raises(ValueError, match=rf"{next(iter(more))}=.*already"):
        compile_for_h200(jax.jit(lambda x: x + 1), ARGUMENTS, **more)
