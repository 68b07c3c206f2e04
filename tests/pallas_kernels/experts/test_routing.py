"""The choice of experts and their tiles, by the kernels in Mosaic's interpreter."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.common import block_selection
from pallas_kernels.experts import route
from pallas_kernels.experts.tiles import TilePlan, make_tiles

pytestmark = pytest.mark.compiles
INTERPRET = plgpu.InterpretGPUParams(detect_races=True)
RACE = "RACE DETECTED"


def test_route(capsys: pytest.CaptureFixture[str]) -> None:
    """A bias that counts twice, another layer's, equal scores in a wrong order, padding routed."""
    rng = np.random.default_rng(0)
    scores = rng.random((4, 128)).astype(np.float32)
    bias = rng.normal(size=(2, 128)).astype(np.float32) / 8
    scores[0, [9, 70]], bias[1, [9, 70]] = 0.5, 1
    scores[1], bias[1, 3] = 0, -2  # weights of nothing
    positions = jnp.array([3, 0, -1, 7])
    run = functools.partial(route, per_token=4, scaling=2.5)
    arguments = (jnp.asarray(scores), jnp.asarray(bias), positions, jnp.int32(1))
    experts, weights = jax.jit(functools.partial(run, implementation="interpreter"))(*arguments)
    expected, expected_weights = jax.jit(functools.partial(run, implementation="reference"))(
        *arguments
    )
    np.testing.assert_array_equal(experts, expected)
    assert experts[0, :2].tolist() == [9, 70] and (experts[2] == 128).all()
    routed = np.asarray(positions) >= 0
    np.testing.assert_allclose(weights[routed], expected_weights[routed], rtol=2**-21)
    assert RACE not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("tokens", "per_token", "num_experts", "largest"),
    # Experts without a pair skipped, or not; pairs listed in several parts, the last one not whole.
    [(1, 4, 6, 8192), (12, 4, 21, 8192), (70, 8, 11, 8192), (72, 8, 9, 256)],
)
def test_tiles(
    tokens: int,
    per_token: int,
    num_experts: int,
    largest: int,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Pairs of an expert that are lost, doubled or out of order; tiles that overlap or are too
    many."""
    monkeypatch.setattr(block_selection, "LARGEST_BLOCK", largest)
    rng = np.random.default_rng(tokens)
    chosen = np.stack([rng.permutation(num_experts - 1)[:per_token] for _ in range(tokens)])
    chosen[tokens // 2 :][:1] = num_experts if tokens > 1 else chosen[0]
    experts = jnp.asarray(chosen, jnp.int32)
    tiles = make_tiles(experts, num_experts, 8, interpret=INTERPRET)
    used, headers, pairs = (np.asarray(x) for x in (tiles.used, tiles.header, tiles.pairs))
    plan = TilePlan(tokens, per_token, num_experts, 8, interpreted=True)
    assert used[0] <= plan.most_tiles == len(headers)
    found: dict[int, list[int]] = {}
    for (expert, count, *_), places in zip(headers[: used[0]], pairs, strict=False):
        assert 0 <= count <= 8
        found.setdefault(int(expert), []).extend(places[:count].tolist())
    for expert in range(num_experts):
        listed = np.flatnonzero(chosen.reshape(-1) == expert).tolist()
        assert found.pop(expert, []) == listed
        if plan.skips_idle and not listed:
            assert expert not in headers[: used[0], 0]
    first = tokens * per_token
    assert found == {num_experts: list(range(first, first + tokens))}
    assert RACE not in capsys.readouterr().out


def test_unsupported_choices() -> None:
    """Sizes that the kernel cannot choose from or write, given to it."""
    sizes = ((2, 100, 4, "100 experts"), (2, 128, 6, "6 experts a token"), (0, 128, 4, "no tokens"))
    for tokens, experts, per_token, reason in sizes:
        with pytest.raises(ValueError, match=f"'interpreter': .*{reason}"):
            route(
                jnp.zeros((tokens, experts)),
                jnp.zeros((1, experts)),
                jnp.zeros((tokens,), jnp.int32),
                0,
                per_token=per_token,
                scaling=1.0,
                implementation="interpreter",
            )
