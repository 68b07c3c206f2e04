import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from pallas_kernels.common.row_format import RowKind
from pallas_kernels.stage_rows import stage_pages, stage_rows
from tests.helpers.two_memories import (
    DEVICE_PAGES,
    HOST_PAGES,
    LAYERS,
    ROWS_PER_DEVICE,
    TwoMemories,
)

pytestmark = pytest.mark.compiles
EVERYWHERE, BY_DEVICE = PartitionSpec(), PartitionSpec("model")
MISSES = 150  # two bursts of 64 rows and a part of one
JUNK = [-1, 2**31 - 1]  # what lies beyond the end of a list

stores = pytest.mark.parametrize(
    ("num_devices", "kind"), [(1, "float32"), (2, "bfloat16"), (1, "fp8"), (2, "fp8")]
)


def junk_beyond(count: int, values: np.ndarray) -> np.ndarray:
    values[count:] = np.resize(JUNK, len(values) - count)
    return values.astype(np.int32)


@stores
def test_stage_rows(num_devices: int, kind: RowKind) -> None:
    """A row of another layer, device or page; one beyond the list; a slab that is copied."""

    def stage(slab, host, first, num_layers, host_rows, device_rows, count) -> tuple:
        lists = (host_rows[0], device_rows[0], count[0])
        return stage_rows(slab, host, first, num_layers, *lists), host

    memories, rng = TwoMemories.create(num_devices, kind), np.random.default_rng(1)
    lists = np.zeros((num_devices, MISSES), np.int32)
    one = (jnp.int32(1), EVERYWHERE)
    inputs = (one, one, (lists, BY_DEVICE), (lists, BY_DEVICE), (lists[:, 0], BY_DEVICE))
    compiled = memories.compile(stage, *inputs)
    devices = memories.devices()
    for first, num_layers, count in [
        (0, 1, 0),
        (0, LAYERS, MISSES),
        (1, 2, 64),
        (2, 1, 65),
        (0, 2, 1),
        (1, 1, 128),
    ]:
        counts = [count, (count * 2) % 151][:num_devices]
        host_rows, device_rows = np.zeros_like(lists), np.zeros_like(lists)
        for index, own in enumerate(counts):
            read = rng.integers(0, HOST_PAGES * ROWS_PER_DEVICE, MISSES)
            write = rng.permutation(DEVICE_PAGES * ROWS_PER_DEVICE)[:MISSES]
            host_rows[index] = junk_beyond(own, read)
            device_rows[index] = junk_beyond(own, write)
            device = devices[index]
            source = device.host.reshape(-1, *device.host.shape[2:])
            target = device.slab.reshape(LAYERS, -1, *device.slab.shape[3:])
            for layer in range(first, first + num_layers):
                target[layer, write[:own]] = source[read[:own], layer]
        scalars = (jnp.int32(first), jnp.int32(num_layers))
        lengths = np.asarray(counts, np.int32)
        memories = memories.run(compiled, *scalars, host_rows, device_rows, lengths)
        memories.check(devices)


@stores
def test_stage_pages(num_devices: int, kind: RowKind) -> None:
    """A page of another layer or index, above all round the end; one beyond the list."""

    def stage(slab, host, layer, host_pages, device_pages, count) -> tuple:
        return stage_pages(slab, host, layer, host_pages, device_pages, count), host

    memories, rng = TwoMemories.create(num_devices, kind), np.random.default_rng(1)
    size = 20
    example = (np.zeros(size, np.int32), EVERYWHERE)
    one = (jnp.int32(1), EVERYWHERE)
    compiled = memories.compile(stage, one, example, example, one)
    devices, total = memories.devices(), LAYERS * DEVICE_PAGES
    for layer, count in [(1, 0), (0, 7), (1, size), (LAYERS - 1, 12)]:
        host_pages = junk_beyond(count, rng.permutation(HOST_PAGES)[:size])
        device_pages = rng.permutation(total)[:size]
        device_pages[:2] = 0, total - 1  # the layer's own first page, and the last that it reaches
        for device in devices:
            pages = device.slab.reshape(total, *device.slab.shape[2:])
            for page, index in zip(host_pages[:count], device_pages[:count], strict=True):
                pages[(layer * DEVICE_PAGES + index) % total] = device.host[page, :, layer]
        inputs = (host_pages, junk_beyond(count, device_pages), jnp.int32(count))
        memories = memories.run(compiled, jnp.int32(layer), *inputs)
        memories.check(devices)
