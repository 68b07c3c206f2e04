"""Rows in host memory, what of them is on the device for now, and how a step finds them."""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Shaped

from kvcache.geometry import KVGeometry
from kvcache.reads import NUM_READS, Reads
from pallas_kernels.common.pytree import pytree_dataclass
from pallas_kernels.resolve_rows import RowCache


@pytree_dataclass
class HostTier:
    """Host pages, the row-cache rows of each sequence slot, and counts of what steps read.

    An index group's row-cache rows lie in its own layers of the leased pages, so one lease serves
    all groups. Each device has its own row-cache rows and counts: the last axis of the fields that
    say so is as many entries a device.

    Attributes:
        slab: MLA rows [host_pages, rows_per_page, layers, width], sharded on rows_per_page: a row's
            layers lie side by side, so that a missed row of any index group is one burst.
        row_cache: what the slots keep of host pages on the device; each device has entries of its
            own, side by side on the last axes of `row`, `mean` and `entry`.
        staging_page: int32 [staging_pages], device pages that a prefill may write host pages to,
            -1 beyond the last.
        selections: float32 [pages by device], decayed count of selections of a page's rows.
        reads: int32 [slots, NUM_READS by device], the fields of `Reads` side by side, modulo 2**32.
    """

    slab: Shaped[Array, "host_pages rows_per_page layers width"]
    row_cache: RowCache
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
        sequence_rows = geometry.sequence_rows if geometry.reads_host else 0
        return cls(
            jnp.zeros(shape, row.dtype),
            RowCache(
                jnp.full((slots, geometry.row_cache_pages), -1, jnp.int32),
                jnp.full(entries, -1, jnp.int32),
                jnp.full(entries, jnp.nan, jnp.float32),
                jnp.zeros((slots, devices * sequence_rows), jnp.int16),
            ),
            jnp.full((max(geometry.staging_pages, 1),), -1, jnp.int32),
            jnp.zeros((devices * geometry.num_pages,), jnp.float32),
            jnp.zeros((slots, devices * NUM_READS), jnp.int32),
        )

    def lease(
        self, slots: Int[Array, " changes"], pages: Int[Array, "changes row_cache_pages"]
    ) -> "HostTier":
        """Gives slots other row-cache pages, or none (-1), with nothing in them; slot -1 is
        padding."""
        target = jnp.where(slots >= 0, slots, self.row_cache.page.shape[0])
        row_cache = dataclasses.replace(
            self.row_cache,
            page=self.row_cache.page.at[target].set(pages, mode="drop"),
            row=self.row_cache.row.at[target].set(-1, mode="drop"),
        )
        return dataclasses.replace(self, row_cache=row_cache)

    def count(
        self,
        slots: Int[Array, " sequences"],
        pages: Int[Array, "sequences rows k"],
        reads: Reads[Int[Array, " sequences"]],
    ) -> "HostTier":
        """Counts what a step of one index group selected (pages, -1 for none) and read."""
        counted = jnp.where(pages >= 0, pages, self.selections.shape[0]).reshape(-1)
        target = jnp.where(slots >= 0, slots, self.reads.shape[0])
        return dataclasses.replace(
            self,
            selections=self.selections.at[counted].add(1.0, mode="drop"),
            reads=self.reads.at[target].add(reads.pack(), mode="drop"),
        )
