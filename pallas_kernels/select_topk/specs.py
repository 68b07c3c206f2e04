"""Shapes of selection: GLM-5.3's, and small odd ones for the interpreter."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int


@dataclasses.dataclass(frozen=True, slots=True)
class SelectSpec:
    """Scores to select from.

    Attributes:
        num_rows: query rows.
        context: positions of a device.
        k: how many to select.
        shards: devices whose selections are merged.
    """

    num_rows: int
    context: int
    k: int
    shards: int = 8

    @property
    def shapes(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Scores, positions and last positions, for `select_topk`."""
        return (
            jax.ShapeDtypeStruct((self.num_rows, self.context), jnp.float32),
            jax.ShapeDtypeStruct((self.context,), jnp.int32),
            jax.ShapeDtypeStruct((self.num_rows,), jnp.int32),
        )

    @property
    def merge_shapes(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Scores and positions, for `merge_topk`."""
        shape = (self.shards, self.num_rows, self.k)
        return jax.ShapeDtypeStruct(shape, jnp.float32), jax.ShapeDtypeStruct(shape, jnp.int32)


SPECS = {
    # A device's eighth of contexts of 1M and 128K positions; sequences times rows of a step.
    "glm_1m": SelectSpec(8, 131072, 2048),
    "glm_1m_drafts": SelectSpec(32, 131072, 2048),
    "glm_128k": SelectSpec(8, 16384, 2048),
    "glm_128k_batch": SelectSpec(128, 16384, 2048),
    # All of 1M positions on one device.
    "glm_one_device": SelectSpec(8, 1 << 20, 2048, shards=1),
    "odd_short": SelectSpec(3, 300, 64, shards=3),
    "odd_whole": SelectSpec(2, 200, 301, shards=1),
    "odd_long": SelectSpec(3, 1333, 131, shards=5),
}
"""By name."""


def distinct_scores(spec: SelectSpec, rng: np.random.Generator) -> Float[Array, "rows context"]:
    """Scores, hardly any of which are equal."""
    return jnp.asarray(rng.normal(size=(spec.num_rows, spec.context)), jnp.float32)


def tied_scores(spec: SelectSpec, rng: np.random.Generator) -> Float[Array, "rows context"]:
    """Scores of few values, zeros of both signs and infinities among them."""
    values = np.array([-np.inf, -1.0, -0.0, 0.0, 1.0, np.inf], np.float32)
    chances = [0.2, 0.1, 0.25, 0.25, 0.15, 0.05]
    return jnp.asarray(rng.choice(values, (spec.num_rows, spec.context), p=chances))


def positions_of(spec: SelectSpec) -> Int[Array, " context"]:
    """Positions of the last of the devices."""
    return jnp.arange(spec.context, dtype=jnp.int32) * spec.shards + spec.shards - 1


def selections(
    spec: SelectSpec, rng: np.random.Generator, tied: bool
) -> tuple[Float[Array, "shards rows k"], Int[Array, "shards rows k"]]:
    """Selections of the devices in the order of their positions, some of them less than k."""
    shape = (spec.shards, spec.num_rows, spec.k)
    scores = rng.integers(0, 3, shape) - 1.0 if tied else rng.normal(size=shape)
    # Every row has positions of its own, those of a device congruent.
    local = rng.permuted(np.tile(np.arange(2 * spec.k), (*shape[:2], 1)), axis=2)[..., : spec.k]
    positions = np.sort(local) * spec.shards + np.arange(spec.shards)[:, None, None]
    missing = np.arange(spec.k) >= rng.integers(0, 2 * spec.k, shape[:2])[..., None]
    scores, positions = np.where(missing, -np.inf, scores), np.where(missing, -1, positions)
    return jnp.asarray(scores, jnp.float32), jnp.asarray(positions, jnp.int32)
