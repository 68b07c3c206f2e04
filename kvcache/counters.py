"""What the cache did, for one request or in total."""

import dataclasses

import numpy as np
from jaxtyping import Int

from kvcache.host_tier import READS


@dataclasses.dataclass(frozen=True, kw_only=True)
class CacheCounters:
    """Counts of one request or of all.

    A read is one row that an index group selected for one token. Without a host tier every row is
    resident, and reads are not counted.

    Attributes:
        cached_tokens: prompt tokens that were found in the cache.
        resident_reads: rows read on resident pages.
        hot_reads: rows of host pages found among the hot rows.
        staged_reads: rows brought to the device in the step that read them.
        host_reads: rows read in host memory, in place.
        missed_rows: rows that a step needed from the host tier and were not hot; those that several
            tokens of a decode step select are counted once.
        staged_bytes: bytes copied to the device for single steps, all layers and devices.
        cleaned_pages: pages copied to the host.
        cleaned_bytes: their bytes.
    """

    cached_tokens: int = 0
    resident_reads: int = 0
    hot_reads: int = 0
    staged_reads: int = 0
    host_reads: int = 0
    missed_rows: int = 0
    staged_bytes: int = 0
    cleaned_pages: int = 0
    cleaned_bytes: int = 0

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
        self._seen = np.zeros((max_sequences, len(READS)), np.int64)
        self._counted = np.zeros_like(self._seen)

    def update(self, reads: Int[np.ndarray, "slots reads"]) -> None:
        """Takes the device's counts, summed over devices. At most 2**32 after the last."""
        self._counted += (reads.astype(np.int64) - self._seen) & 0xFFFFFFFF
        self._seen = reads.astype(np.int64)

    def take(self, slot: int, row_bytes: int) -> CacheCounters:
        """A slot's counts since they were last taken."""
        resident, hot, staged, host, missed, layer_rows = self._counted[slot].tolist()
        self._counted[slot] = 0
        return CacheCounters(
            resident_reads=resident,
            hot_reads=hot,
            staged_reads=staged,
            host_reads=host,
            missed_rows=missed,
            staged_bytes=layer_rows * row_bytes,
        )
