"""The paged KV store: geometry, device state, its transitions, and the bookkeeping of its pages."""

from kvcache.counters import CacheCounters
from kvcache.device.device_state import DeviceState
from kvcache.device.interface import SimulatedDevice
from kvcache.device.sequence_state import SequenceState
from kvcache.device.store import KVStore
from kvcache.geometry import KVGeometry
from kvcache.kv_cache import KVCache
from kvcache.page_pool import OutOfPagesError, PagePool
from kvcache.prefix.tree import EncodedTokens

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
