"""The paged KV store: geometry, device state, its transitions, and the account of its pages."""

from kvcache.cache_device import SimulatedDevice
from kvcache.counters import CacheCounters
from kvcache.device_state import DeviceState
from kvcache.geometry import KVGeometry
from kvcache.kv_cache import KVCache
from kvcache.page_pool import OutOfPagesError, PagePool
from kvcache.page_tree import EncodedTokens
from kvcache.sequence_state import SequenceState
from kvcache.store import KVStore

__all__ = [
    "CacheCounters",
    "DeviceState",
    "EncodedTokens",
    "KVCache",
    "KVGeometry",
    "KVStore",
    "OutOfPagesError",
    "PagePool",
    "SequenceState",
    "SimulatedDevice",
]
