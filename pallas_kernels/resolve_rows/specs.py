"""Shapes of resolution: GLM-5.3's, and small odd ones for the interpreter."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.common.pytree import make_unchecked
from pallas_kernels.resolve_rows.row_cache import RowCache, SelectedRows

Arguments = tuple[RowCache, SelectedRows, Any]
"""Traced arguments of `resolve_rows`: arrays, or their shapes."""


@dataclasses.dataclass(frozen=True, slots=True)
class ResolveSpec:
    """A step's selections and the row-cache rows that they meet.

    Attributes:
        sequences: sequences of the step.
        rows: query rows of each.
        k: selected rows of each.
        entries: row-cache rows of a sequence.
        context: most rows of a sequence on a device.
        groups: index groups.
        rows_per_page: rows of a page on a device.
        first_host_row: id of the first host row.
    """

    sequences: int
    rows: int
    k: int
    entries: int
    context: int
    groups: int
    rows_per_page: int
    first_host_row: int

    @property
    def slots(self) -> int:
        """Sequence slots: one more than sequences."""
        return self.sequences + 1

    @property
    def static(self) -> dict[str, int]:
        """The arguments that are not traced."""
        return {"first_host_row": self.first_host_row, "rows_per_page": self.rows_per_page}

    @property
    def shapes(self) -> "Arguments":
        """The traced arguments of `resolve_rows`, shapes in place of arrays."""
        state = (self.slots, self.groups, self.entries)
        selected = (self.sequences, self.rows, self.k)
        shape = jax.ShapeDtypeStruct
        row_cache = make_unchecked(
            RowCache,
            page=shape((self.slots, self.entries // self.rows_per_page), jnp.int32),
            row=shape(state, jnp.int32),
            mean=shape(state, jnp.float32),
            entry=shape((self.slots, self.context), jnp.int16),
        )
        selections = make_unchecked(
            SelectedRows,
            slots=shape((self.sequences,), jnp.int32),
            rows=shape(selected, jnp.int32),
            row_ids=shape(selected, jnp.int32),
            scores=shape((self.sequences, self.entries), jnp.float32),
        )
        return row_cache, selections, shape((), jnp.int32)


def _glm(sequences: int, rows: int, entries: int) -> ResolveSpec:
    return ResolveSpec(sequences, rows, 2048, entries, 131072, 22, 64, 1 << 20)


SPECS = {
    "glm_1x8": _glm(8, 1, 4096),
    "glm_4x8": _glm(8, 4, 4096),
    "glm_4x32": _glm(32, 4, 8192),
    "glm_6x32": _glm(32, 6, 8192),
    # One query row; several, whose selections take more than one piece; more misses than row-cache
    # rows.
    "odd_1": ResolveSpec(3, 1, 300, 256, 700, 2, 4, 1000),
    "odd_3": ResolveSpec(3, 3, 230, 256, 450, 2, 8, 1000),
}
"""By name."""


def arguments(spec: ResolveSpec, rng: np.random.Generator, on_host: float) -> Arguments:
    """Random arguments, some sequences of which are padding or have no row-cache rows.

    Args:
        spec: their shapes.
        rng: where they come from.
        on_host: fraction of the rows of a sequence that are host rows.
    """
    context, entries = spec.context, spec.entries
    held = np.full((spec.slots, spec.groups, entries), -1)
    for group in held.reshape(-1, entries):
        number = rng.integers(min(entries, context) + 1)
        group[rng.permutation(entries)[:number]] = rng.permutation(context)[:number]
    # Few values, so that many are equal, zeros of both signs among them.
    mean = rng.choice(np.array([-1, -0.0, 0.0, 2, np.nan, -np.inf]), held.shape)
    pages_of_all = np.arange(spec.slots * (entries // spec.rows_per_page))
    pages = rng.permutation(pages_of_all).reshape(spec.slots, -1)
    pages[rng.random(spec.slots) < 0.15] = -1
    slots = rng.permutation(spec.slots)[: spec.sequences]
    slots[rng.random(spec.sequences) < 0.15] = -1
    # What a map holds where no row-cache row agrees with it means nothing.
    junk = rng.integers(-(2**15), 2**15, (spec.slots, context))
    selected = (spec.sequences, spec.rows, spec.k)
    rows = rng.permuted(np.tile(np.arange(context), (*selected[:2], 1)), axis=2)[..., : spec.k]
    where = np.where(
        rng.random((spec.slots, context)) < on_host,
        spec.first_host_row + rng.permutation(context),
        rng.integers(0, spec.first_host_row, (spec.slots, context)),
    )
    row_ids = where[slots[:, None, None], rows]
    row_ids[(rng.random(selected) < 0.1) | (slots < 0)[:, None, None]] = -1
    scores = rng.integers(-2, 3, (spec.sequences, entries))
    group = rng.integers(spec.groups)
    row_cache = RowCache(
        page=jnp.asarray(pages, jnp.int32),
        row=jnp.asarray(held, jnp.int32),
        mean=jnp.asarray(mean, jnp.float32),
        entry=jnp.asarray(junk, jnp.int16),
    )
    selections = SelectedRows(
        slots=jnp.asarray(slots, jnp.int32),
        rows=jnp.asarray(rows, jnp.int32),
        row_ids=jnp.asarray(row_ids, jnp.int32),
        scores=jnp.asarray(scores, jnp.float32),
    )
    return row_cache, selections, jnp.asarray(group, jnp.int32)
