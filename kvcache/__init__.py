"""The paged KV store: geometry, device state and its transitions, and the page pool."""

from kvcache.geometry import KVGeometry
from kvcache.page_pool import OutOfPagesError, PagePool
from kvcache.sequence_state import SequenceState
from kvcache.store import KVStore

__all__ = ["KVGeometry", "KVStore", "OutOfPagesError", "PagePool", "SequenceState"]
