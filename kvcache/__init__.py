"""The paged KV store: geometry, device state, its transitions, and the account of its pages."""

from kvcache.counters import CacheCounters
from kvcache.geometry import KVGeometry
from kvcache.kv_cache import KVCache
from kvcache.page_pool import OutOfPagesError, PagePool
from kvcache.sequence_state import SequenceState
from kvcache.store import KVStore

__all__ = [
    "CacheCounters",
    "KVCache",
    "KVGeometry",
    "KVStore",
    "OutOfPagesError",
    "PagePool",
    "SequenceState",
]
