from collections.abc import Callable

import numpy as np
import pytest
from jax.sharding import PartitionSpec

from pallas_kernels.common.row_format import RowKind
from pallas_kernels.move_pages import copy_pages, offload_pages, onload_pages
from tests.helpers.two_memories import DEVICE_PAGES, HOST_PAGES, Bytes, TwoMemories

pytestmark = pytest.mark.compiles
SIZE = 8

stores = pytest.mark.parametrize(
    ("num_devices", "kind"), [(1, "float32"), (2, "bfloat16"), (1, "fp8"), (2, "fp8")]
)


def check_moves(
    num_devices: int,
    kind: RowKind,
    op: Callable,
    move: Callable[[Bytes, int, int], None],
    sources: int,
    targets: int,
) -> None:
    """Compares lists of moves, from none to full, with `move` in numpy."""
    memories, rng = TwoMemories.create(num_devices, kind), np.random.default_rng(1)
    compiled = memories.compile(op, (np.zeros((SIZE, 2), np.int32), PartitionSpec()))
    devices = memories.devices()
    for count in (0, 1, 5, SIZE):
        moves = np.full((SIZE, 2), -1, np.int32)
        moves[:count, 0] = rng.permutation(sources)[:count]
        # None of them is read too: the order of a list means nothing.
        idle = np.setdiff1d(np.arange(targets), moves[:, 0])
        moves[:count, 1] = rng.permutation(idle)[:count]
        for device in devices:
            for source, target in moves[:count].tolist():
                move(device, source, target)
        memories = memories.run(compiled, moves)
        memories.check(devices)


@stores
def test_offload_pages(num_devices: int, kind: RowKind) -> None:
    """A page stored from or to another place, with its layers mixed up, or by padding."""

    def move(device: Bytes, source: int, target: int) -> None:
        device.host[target] = device.slab[:, source].swapaxes(0, 1)

    def op(slab, host, moves) -> tuple:
        return slab, offload_pages(slab, host, moves)

    check_moves(num_devices, kind, op, move, DEVICE_PAGES, HOST_PAGES)


@stores
def test_onload_pages(num_devices: int, kind: RowKind) -> None:
    """A page loaded from or to another place, with its layers mixed up, or by padding."""

    def move(device: Bytes, source: int, target: int) -> None:
        device.slab[:, target] = device.host[source].swapaxes(0, 1)

    def op(slab, host, moves) -> tuple:
        return onload_pages(slab, host, moves), host

    check_moves(num_devices, kind, op, move, HOST_PAGES, DEVICE_PAGES)


@stores
def test_copy_pages(num_devices: int, kind: RowKind) -> None:
    """A page copied from or to another place, of one layer only, or by padding."""

    def move(device: Bytes, source: int, target: int) -> None:
        device.slab[:, target] = device.slab[:, source]

    def op(slab, host, moves) -> tuple:
        return copy_pages(slab, moves), host

    check_moves(num_devices, kind, op, move, DEVICE_PAGES, DEVICE_PAGES)
