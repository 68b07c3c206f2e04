"""Counters of the cache, for one request or in total."""

import dataclasses

import numpy as np
from jaxtyping import Int, Int64

from kvcache.reads import NUM_READS, Reads, no_reads


@dataclasses.dataclass(frozen=True, kw_only=True)
class CacheCounters:
    """Counts of one request or of all.

    A read is one row that an index group selected for one token. Without a host tier every row is
    resident, and reads are not counted.

    Attributes:
        cached_tokens: prompt tokens that were found in the cache.
        resident_reads: rows read on resident pages.
        row_cache_reads: rows of host pages found among the row-cache rows.
        staged_reads: rows brought to the device in the step that read them.
        host_reads: rows read in host memory, in place.
        missed_rows: rows that a step needed from the host tier and were not in the row cache; those
            that several tokens of a decode step select are counted once.
        staged_bytes: bytes copied to the device for single steps, all layers and devices.
        offloaded_pages: pages copied to the host.
        offloaded_bytes: their bytes.
    """

    cached_tokens: int = 0
    resident_reads: int = 0
    row_cache_reads: int = 0
    staged_reads: int = 0
    host_reads: int = 0
    missed_rows: int = 0
    staged_bytes: int = 0
    offloaded_pages: int = 0
    offloaded_bytes: int = 0

    @classmethod
    def of_reads(cls, reads: Int64[np.ndarray, " reads"], row_bytes: int) -> "CacheCounters":
        """Counters of reads that `ReadCounts.update` has returned."""
        counts = Reads.unpack(reads)
        return cls(
            resident_reads=counts.resident,
            row_cache_reads=counts.row_cache,
            staged_reads=counts.staged,
            host_reads=counts.host,
            missed_rows=counts.missed,
            staged_bytes=counts.layer_rows_staged * row_bytes,
        )

    def __add__(self, other: "CacheCounters") -> "CacheCounters":
        return CacheCounters(
            **{
                field.name: getattr(self, field.name) + getattr(other, field.name)
                for field in dataclasses.fields(self)
            }
        )


class ReadCounts:
    """Reads of each sequence slot, from counts on the device that are modulo 2**32."""

    def __init__(self, max_sequences: int) -> None:
        self._seen = no_reads(max_sequences)

    def update(
        self,
        slots: Int[np.ndarray, " sequences"],
        reads: Int[np.ndarray, "sequences reads_by_device"],
    ) -> Int64[np.ndarray, "sequences reads"]:
        """Reads since the last update, by slot.

        Args:
            slots: different slots.
            reads: the device's counts of each; see `HostTier.reads`. At most 2**32 more than last.
        """
        by_device = reads.reshape(len(reads), -1, NUM_READS)
        total = by_device.sum(axis=1, dtype=np.int64)
        new = (total - self._seen[slots]) & 0xFFFFFFFF
        self._seen[slots] = total
        return new
