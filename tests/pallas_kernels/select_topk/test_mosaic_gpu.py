"""The selection kernel in Mosaic's interpreter, which looks for races, against the reference."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from pallas_kernels.common import block_selection
from pallas_kernels.select_topk import merge_topk, reference, select_topk
from pallas_kernels.select_topk.specs import (
    SPECS,
    SelectSpec,
    distinct_scores,
    positions_of,
    selections,
    tied_scores,
)
from tests.helpers.bits import assert_same_bits

pytestmark = pytest.mark.compiles
RACE = "RACE DETECTED"
FIRST = 9

cases = pytest.mark.parametrize("name", [name for name in SPECS if name.startswith("odd")])


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that few scores take several rounds."""
    monkeypatch.setattr(block_selection, "LARGEST_BLOCK", 512)


def score_kinds(spec: SelectSpec, rng: np.random.Generator) -> list[jax.Array]:
    shape = (spec.num_rows, spec.context)
    zeros = jnp.asarray(np.where(rng.random(shape) < 0.5, 0.0, -0.0), jnp.float32)
    # The best are the last of all, so that every round's threshold is in its last block.
    ascending = jnp.broadcast_to(jnp.arange(spec.context, dtype=jnp.float32), shape)
    nothing = jnp.full(shape, -jnp.inf)
    return [distinct_scores(spec, rng), tied_scores(spec, rng), zeros, ascending, nothing]


@cases
def test_selection(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Another threshold, other ones of equal scores, a block's indices lost or at another place."""
    spec, rng = SPECS[name], np.random.default_rng(0)
    positions = positions_of(spec)
    kernel = jax.jit(
        functools.partial(select_topk, first=FIRST, k=spec.k, implementation="interpreter")
    )
    expect = jax.jit(functools.partial(reference.select_topk, first=FIRST, k=spec.k))
    end = int(positions[-1])
    for number, scores in enumerate(score_kinds(spec, rng)):
        lasts = np.roll(np.array([end, rng.integers(end), rng.integers(-1, FIRST)]), number)
        last = jnp.asarray(lasts[: spec.num_rows], jnp.int32)
        found = kernel(scores, positions, last=last)
        expected = expect(scores, positions, last=last)
        for some, other in zip(found, expected, strict=True):
            assert_same_bits(some, other)
    assert RACE not in capsys.readouterr().out


def test_unordered_selection() -> None:
    """A position that lost its score where nothing is sorted, or an order that is not its own."""
    spec, rng = SPECS["odd_long"], np.random.default_rng(0)
    arguments = (tied_scores(spec, rng), positions_of(spec), 0, jnp.array([9999, 700, 5]), spec.k)
    found, expected = (
        select_topk(*arguments, ordered=False, implementation=implementation)
        for implementation in ("interpreter", "reference")
    )
    for some, other in zip(found, expected, strict=True):
        assert_same_bits(some, other)


def test_full_block(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """An index or a distance that does not fit where a small block's does."""
    monkeypatch.undo()
    spec, rng = SelectSpec(2, block_selection.LARGEST_BLOCK, 2048, 1), np.random.default_rng(0)
    positions, last = positions_of(spec), jnp.full(2, spec.context)
    kernel = jax.jit(
        functools.partial(select_topk, first=0, k=spec.k, implementation="interpreter")
    )
    for scores in (distinct_scores(spec, rng), jnp.where(tied_scores(spec, rng) > 0, 1.0, 0.0)):
        found = kernel(scores, positions, last=last)
        expected = reference.select_topk(scores, positions, 0, last, spec.k)
        for some, other in zip(found, expected, strict=True):
            assert_same_bits(some, other)
    assert RACE not in capsys.readouterr().out


@cases
def test_merge(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Ties that are broken by the shard and not by the position, or another shard's positions."""
    spec, rng = SPECS[name], np.random.default_rng(0)
    kernel = jax.jit(functools.partial(merge_topk, implementation="interpreter"))
    for number, tied in enumerate((False, True, True)):
        shard = jnp.int32(number % spec.shards)
        arguments = (*selections(spec, rng, tied), shard)
        assert_same_bits(kernel(*arguments), reference.merge_topk(*arguments))
    assert RACE not in capsys.readouterr().out


def test_threshold_of_several_devices() -> None:
    """A threshold that cannot be had from sums of counts alone."""
    keys = jnp.asarray(np.random.default_rng(0).integers(-50, 50, (4, 64)), jnp.int32)
    wanted = 37

    def run(keys: jax.Array) -> tuple[jax.Array, jax.Array]:
        def count_from(key: jax.Array) -> jax.Array:
            return lax.psum(jnp.sum(keys >= key), "devices")

        # On all devices alike.
        low, high = jnp.int32(-51), jnp.int32(51)
        return block_selection.bisect(count_from, jnp.int32(wanted), low, high, jnp.int32(256))

    mesh = Mesh(np.array(jax.devices()), ("devices",))
    sharded = jax.shard_map(
        run,
        mesh=mesh,
        in_specs=PartitionSpec("devices"),
        out_specs=PartitionSpec(),
        check_vma=False,
    )
    threshold, found = jax.jit(sharded)(keys)
    ordered = np.sort(np.asarray(keys).ravel())[::-1]
    assert np.sum(ordered >= threshold) == found >= wanted
    assert found == wanted or threshold == ordered[wanted - 1]


def test_unsupported() -> None:
    """A selection whose rounds would never end, or one refused without reason."""
    scores, positions, last = jnp.zeros((1, 600)), jnp.arange(600), jnp.array([599])
    with pytest.raises(ValueError, match="k=257 is above 256"):
        select_topk(scores, positions, 0, last, 257, implementation="interpreter")
    found = select_topk(scores, positions, 0, last, 257)
    assert found[1].tolist() == [list(range(257))]
