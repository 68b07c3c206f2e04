"""The resolution kernel in Mosaic's interpreter, which looks for races, against the reference."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.resolve_rows import Resolution, mosaic_gpu, resolve_rows
from pallas_kernels.resolve_rows.specs import SPECS, ResolveSpec, arguments
from tests.helpers.bits import assert_same_bits

pytestmark = pytest.mark.compiles
RACE = "RACE DETECTED"


def assert_same(found: Resolution, expected: Resolution) -> None:
    for some, other in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        if some.dtype == jnp.float32:
            # A NaN's bits say nothing.
            some, other = (jnp.where(jnp.isnan(x), jnp.nan, x) for x in (some, other))
        assert_same_bits(*map(jnp.atleast_1d, (some, other)))


@pytest.mark.parametrize("name", [name for name in SPECS if name.startswith("odd")])
def test_resolution(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Another victim, a miss that takes another's place or comes twice, state of a group or
    sequence that is not concerned, lists that are not closed up."""
    # Selections of several rows are listed in two pieces.
    monkeypatch.setattr(mosaic_gpu, "LARGEST_BLOCK", 512)
    spec, rng = SPECS[name], np.random.default_rng(0)
    kernel, reference = (
        jax.jit(functools.partial(resolve_rows, **spec.static, implementation=implementation))
        for implementation in ("interpreter", "reference")
    )
    staged, hits, overflows, fits = 0, 0, 0, 0
    for on_host in (0.0, 0.1, 0.5, 0.5, 0.5, 1.0, 1.0, 1.0):
        given = arguments(spec, rng, on_host)
        found, expected = kernel(*given), reference(*given)
        assert_same(found, expected)
        staged, hits = staged + int(found.num_staged), hits + int(found.hits.sum())
        overflows += int(jnp.sum(found.misses > found.staged))
        fits += int(jnp.sum((found.misses == found.staged) & (found.misses > 0)))
    assert staged > 500
    assert hits > 200
    assert overflows > 0
    assert fits > 0
    assert RACE not in capsys.readouterr().out


def test_unsupported() -> None:
    """Row-cache rows that no warpgroup can share out, given to the kernel or refused without
    reason."""
    spec = ResolveSpec(2, 2, 8, 24, 60, 1, 4, 100)
    given = arguments(spec, np.random.default_rng(0), 0.5)
    with pytest.raises(ValueError, match="row_cache_rows=24 is no multiple of 256"):
        functools.partial(resolve_rows, **spec.static, implementation="interpreter")(*given)
    # Left to itself it takes the reference.
    found = jax.jit(functools.partial(resolve_rows, **spec.static))(*given)
    assert int(found.num_staged) == int(found.staged.sum()) > 0
