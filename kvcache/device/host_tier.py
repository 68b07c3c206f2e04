"""Rows in host memory, what of them is on the device for now, and how a step finds them."""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Shaped

from kvcache.device.pytree import pytree_dataclass
from kvcache.geometry import KVGeometry

READS = ("resident", "row_cache", "staged", "host", "missed", "layer_rows_staged")
"""Columns of `HostTier.reads`."""


@pytree_dataclass
class HostTier:
    """Host pages, the row-cache rows of each sequence slot, and counts of what steps read.

    An index group's row-cache rows lie in its own layers of the leased pages, so one lease serves
    all groups. Each device has its own row-cache rows and counts: the last axis of the fields that
    say so is as many entries a device.

    Attributes:
        slab: MLA rows [host_pages, rows_per_page, layers, width], sharded on rows_per_page: a row's
            layers lie side by side, so that a missed row of any index group is one burst.
        row_cache_page: int32 [slots, row_cache_pages], leased device pages, -1 where a slot has no
            lease.
        row_cache_row: int32 [slots, groups, row_cache_rows by device], the row of its sequence on
            this device that each holds, -1 none.
        row_cache_mean: float32 likewise, running mean of its index scores, NaN before the first.
        row_cache_entry: int16 [slots, sequence_rows by device], by row of the sequence the
            row-cache row that may hold it; `row_cache_row` says which. Serves one group after
            another.
        staging_page: int32 [staging_pages], device pages that a prefill may write host pages to,
            -1 beyond the last.
        selections: float32 [pages by device], decayed count of selections of a page's rows.
        reads: int32 [slots, len(READS) by device], selected rows by where they were found (resident
            page, row-cache row, staged in this step, host memory in place), rows that were on no
            page of the device and not in the row cache, which row-cache rows count once a step, and
            rows staged, each layer counted. Modulo 2**32.
    """

    slab: Shaped[Array, "host_pages rows_per_page layers width"]
    row_cache_page: Int[Array, "slots row_cache_pages"]
    row_cache_row: Int[Array, "slots groups entries"]
    row_cache_mean: Float[Array, "slots groups entries"]
    row_cache_entry: Int[Array, "slots context"]
    staging_page: Int[Array, " staging"]
    selections: Float[Array, " pages"]
    reads: Int[Array, "slots reads"]

    @classmethod
    def empty(cls, geometry: KVGeometry) -> "HostTier":
        """No rows, no leases."""
        slots, groups, devices = (
            geometry.max_sequences,
            geometry.num_index_layers,
            geometry.num_devices,
        )
        row = geometry.row_format
        shape = (geometry.host_pages, geometry.rows_per_page, geometry.num_layers, row.width)
        entries = (slots, groups, devices * geometry.row_cache_rows)
        return cls(
            jnp.zeros(shape, row.dtype),
            jnp.full((slots, geometry.row_cache_pages), -1, jnp.int32),
            jnp.full(entries, -1, jnp.int32),
            jnp.full(entries, jnp.nan, jnp.float32),
            jnp.zeros((slots, devices * geometry.sequence_rows * geometry.reads_host), jnp.int16),
            jnp.full((max(geometry.staging_pages, 1),), -1, jnp.int32),
            jnp.zeros((devices * geometry.num_pages,), jnp.float32),
            jnp.zeros((slots, devices * len(READS)), jnp.int32),
        )

    def lease(
        self, slots: Int[Array, " changes"], pages: Int[Array, "changes row_cache_pages"]
    ) -> "HostTier":
        """Gives slots other row-cache pages, or none (-1), with nothing in them; slot -1 is
        padding."""
        target = jnp.where(slots >= 0, slots, self.row_cache_page.shape[0])
        return dataclasses.replace(
            self,
            row_cache_page=self.row_cache_page.at[target].set(pages, mode="drop"),
            row_cache_row=self.row_cache_row.at[target].set(-1, mode="drop"),
        )

    def count(
        self,
        slots: Int[Array, " sequences"],
        pages: Int[Array, "sequences rows k"],
        reads: Int[Array, "sequences reads"],
    ) -> "HostTier":
        """Counts what a step of one index group selected (pages, -1 for none) and read."""
        counted = jnp.where(pages >= 0, pages, self.selections.shape[0]).reshape(-1)
        target = jnp.where(slots >= 0, slots, self.reads.shape[0])
        return dataclasses.replace(
            self,
            selections=self.selections.at[counted].add(1.0, mode="drop"),
            reads=self.reads.at[target].add(reads, mode="drop"),
        )
