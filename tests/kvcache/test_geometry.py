import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from glm53.model.kv_geometry import kv_geometry
from glm53.model.presets import preset
from glm53.model.sharding import make_mesh
from kvcache import KVGeometry, KVStore
from kvcache.geometry import MAX_ROW_CACHE_ROWS
from pallas_kernels.common.row_format import ROW_KINDS, RowFormat, RowKind

SIZES: dict[str, Any] = {
    "group_layers": (1, 2),
    "device_pages": 6,
    "num_devices": 2,
    "max_sequences": 4,
    "max_pages_per_sequence": 5,
    "row_format": RowFormat("fp8", 32, 8, 1e-4),
    "index_row_format": RowFormat("fp8", 16, 0, 1e-6),
    "rows_per_device": 8,
}
HOST_SIZES = {"host_pages": 4, "row_cache_rows": 20, "staging_pages": 3}
COUNTS = [name for name, value in SIZES.items() if isinstance(value, int)]
PAGES = 3
GIB = 1 << 30


def geometry(**sizes: Any) -> KVGeometry:
    return KVGeometry(**SIZES | sizes)


meshes = pytest.mark.parametrize("num_devices", [1, 2, 3, 4, 8])
pages_of = pytest.mark.parametrize("rows_per_device", [1, 4, 64])


@meshes
@pages_of
def test_positions_and_places_are_one_to_one(num_devices: int, rows_per_device: int) -> None:
    """Two positions that share a row, or a row that no position reaches."""
    sizes = geometry(num_devices=num_devices, rows_per_device=rows_per_device)
    positions = range(PAGES * sizes.rows_per_page)
    rows_on_devices = [
        (p % num_devices, p // sizes.rows_per_page, sizes.local_row(p)) for p in positions
    ]
    assert set(rows_on_devices) == {
        (device, page, row)
        for device in range(num_devices)
        for page in range(PAGES)
        for row in range(rows_per_device)
    }
    # On its device, a sequence's positions ascend with the rows of its pages.
    for device in range(num_devices):
        owned = [place for place in rows_on_devices if place[0] == device]
        assert owned == sorted(owned)


@meshes
@pages_of
def test_page_row(num_devices: int, rows_per_device: int) -> None:
    """A place on the rows axis that is not the one of the file format, or on another device."""
    sizes = geometry(num_devices=num_devices, rows_per_device=rows_per_device)
    for page in range(PAGES):
        first = page * sizes.rows_per_page
        positions = np.arange(first, first + sizes.rows_per_page)
        rows = [sizes.page_row(int(p)) for p in positions]
        assert sorted(rows) == list(range(sizes.rows_per_page))
        for p, row in zip(positions.tolist(), rows, strict=True):
            offset = (p % sizes.rows_per_page) // num_devices
            assert row == (p % num_devices) * rows_per_device + offset
            # Where a split of the axis over the devices puts it.
            assert divmod(row, rows_per_device) == (p % num_devices, sizes.local_row(p))


@pytest.mark.compiles
@given(st.integers(0, 2**31 - 1), st.sampled_from([1, 2, 4, 8]), st.sampled_from([4, 64, 512]))
def test_positions_on_the_device(position: int, num_devices: int, rows_per_device: int) -> None:
    """A place that is another in a traced int32 than in a Python integer, or overflows."""
    sizes = geometry(num_devices=num_devices, rows_per_device=rows_per_device)
    for place in (sizes.local_row, sizes.page_row):
        assert int(place(jnp.int32(position))) == place(position)


@given(st.integers(0, 10_000), st.sampled_from([1, 2, 4, 8]), st.sampled_from([4, 64]))
def test_pages_for(num_tokens: int, num_devices: int, rows_per_device: int) -> None:
    """A page too few or too many for a number of tokens."""
    sizes = geometry(num_devices=num_devices, rows_per_device=rows_per_device)
    pages = sizes.pages_for(num_tokens)
    assert (pages - 1) * sizes.rows_per_page < num_tokens <= pages * sizes.rows_per_page


def test_sizes() -> None:
    """Sizes of the slab that forget the devices, or count host pages."""
    sizes = geometry(**HOST_SIZES)
    assert (sizes.num_layers, sizes.num_index_layers) == (3, 2)
    assert sizes.num_pages == 6 + 4
    assert sizes.rows_per_page == 16
    assert sizes.device_rows == 6 * 8
    assert sizes.slab_rows == 3 * 6 * 8
    assert sizes.sequence_rows == 5 * 8
    assert sizes.row_cache_pages == 3
    assert sizes.page_bytes == 3 * 16 * (32 + 4 + 16)
    assert sizes.index_page_bytes == 2 * 16 * (16 + 4)
    assert sizes.token_bytes == 3 * 52 + 2 * 20
    assert sizes.row_cache_row_bytes == 3 * 52


@pytest.mark.compiles
@pytest.mark.parametrize("num_devices", [1, 2])
@pytest.mark.parametrize("kind", ROW_KINDS)
@pytest.mark.parametrize("host_sizes", [{}, HOST_SIZES, HOST_SIZES | {"staging_pages": 0}])
def test_bytes_are_those_of_the_arrays(
    num_devices: int, kind: RowKind, host_sizes: dict[str, int]
) -> None:
    """An array of the store that a budget of memory does not know of."""
    sizes = geometry(
        num_devices=num_devices,
        row_format=RowFormat(kind, 32, 8, 1e-4),
        index_row_format=RowFormat(kind, 16, 0, 1e-6),
        **host_sizes,
    )
    found = {"device": 0, "pinned_host": 0}
    for array in jax.tree.leaves(KVStore.create(sizes, make_mesh(num_devices))):
        kind = array.sharding.memory_kind
        found[kind] += sum(shard.data.nbytes for shard in array.addressable_shards)
    assert found == {"device": sizes.device_bytes, "pinned_host": sizes.host_bytes}


@settings(max_examples=300)
@given(
    st.integers(0, 200_000),
    st.integers(0, 200_000),
    st.sampled_from([1, 2, 8]),
    st.sampled_from([(1,), (1, 2), (4, 4)]),
    st.integers(1, 4),
)
def test_pages_within(
    device_bytes: int,
    host_bytes: int,
    num_devices: int,
    group_layers: tuple[int, ...],
    least: int,
) -> None:
    """Pages that do not fit, or room for a page that is left; a host page without its keys, or one
    whose keys leave too few device pages."""
    sizes = geometry(num_devices=num_devices, group_layers=group_layers)
    device_pages, host_pages = sizes.pages_within(device_bytes, host_bytes, least)
    page, keys = sizes.page_bytes, sizes.index_page_bytes

    def fits(device_pages: int, host_pages: int) -> bool:
        taken = device_pages * page + (device_pages + host_pages) * keys
        return taken <= device_bytes and host_pages * page <= host_bytes

    assert device_pages >= 0 and host_pages >= 0
    assert fits(device_pages, host_pages)
    assert not fits(device_pages + 1, host_pages)
    # A host page more would not fit beside the least device pages.
    assert not fits(least, host_pages + 1)
    assert device_pages >= least or not host_pages


@pytest.mark.parametrize("kind", ["fp8", "bfloat16"])
@pytest.mark.parametrize(("max_model_len", "max_waste"), [(131_072, 0.02), (1_048_576, 0.1)])
def test_bookkeeping_is_small(kind: RowKind, max_model_len: int, max_waste: float) -> None:
    """Maps that eat the memory of rows: over 2% of the devices, or a tenth at the longest."""

    def sizes(device_pages: int, **host_sizes: int) -> KVGeometry:
        return kv_geometry(
            preset("glm-5.3"),
            row_kind=kind,
            device_pages=device_pages,
            max_model_len=max_model_len,
            max_sequences=256,
            num_devices=8,
            with_mtp=True,
            **host_sizes,
        )

    device_pages, host_pages = sizes(1).pages_within(8 * int(17.8 * GIB), 512 * GIB)
    hybrid = sizes(device_pages, host_pages=host_pages, row_cache_rows=1024, staging_pages=16)
    rows = hybrid.num_pages * hybrid.index_page_bytes + hybrid.device_pages * hybrid.page_bytes
    assert hybrid.bookkeeping_bytes == hybrid.device_bytes - rows
    assert 0 < hybrid.bookkeeping_bytes <= max_waste * hybrid.device_bytes


@pytest.mark.parametrize(
    ("kind", "key_kind", "with_mtp", "token_bytes"),
    [
        ("fp8", "fp8", True, 54_728),
        ("fp8", "fp8", False, 53_940),
        ("bfloat16", "fp8", True, 93_912),
        ("bfloat16", "fp8", False, 92_628),
        ("bfloat16", "bfloat16", True, 96_640),
        ("bfloat16", "bfloat16", False, 95_232),
    ],
)
@pytest.mark.parametrize("num_devices", [1, 8])
def test_token_bytes_of_glm_5_3(
    kind: RowKind, key_kind: RowKind, with_mtp: bool, token_bytes: int, num_devices: int
) -> None:
    """A cache that takes more than the model's layers and formats need."""
    sizes = kv_geometry(
        preset("glm-5.3"),
        row_kind=kind,
        device_pages=7,
        max_model_len=1_048_576,
        max_sequences=2,
        num_devices=num_devices,
        with_mtp=with_mtp,
    )
    assert sizes.index_row_format.kind == kind
    keys = dataclasses.replace(sizes.index_row_format, kind=key_kind)
    sizes = dataclasses.replace(sizes, index_row_format=keys)
    assert sizes.token_bytes == token_bytes
    assert sizes.page_bytes + sizes.index_page_bytes == 64 * num_devices * token_bytes
    assert (sizes.num_layers, sizes.num_index_layers) == ((79, 22) if with_mtp else (78, 21))
    assert sizes.max_pages_per_sequence == 16_384 // num_devices


@pytest.mark.parametrize("name", COUNTS)
@pytest.mark.parametrize("value", [0, -1])
def test_sizes_that_are_not_positive_are_refused(name: str, value: int) -> None:
    """A size of nothing that fails deep inside jit, without its name."""
    with pytest.raises(ValueError, match=f"{name} .*{value}"):
        geometry(**{name: value})


@pytest.mark.parametrize("name", HOST_SIZES)
def test_negative_sizes_are_refused(name: str) -> None:
    """A size below nothing."""
    with pytest.raises(ValueError, match=f"{name} must be 0 or more, got -1"):
        geometry(**HOST_SIZES | {name: -1})


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"rows_per_device": 96}, "rows_per_device 96"),
        ({"rows_per_device": 1024}, "rows_per_device 1024"),
        ({"group_layers": ()}, r"group_layers .*\(\)"),
        ({"group_layers": (2, 0)}, r"group_layers .*\(2, 0\)"),
        ({"row_cache_rows": 8}, "row_cache_rows 8 .*needs host_pages, which is 0"),
        (
            {"host_pages": 1, "row_cache_rows": MAX_ROW_CACHE_ROWS + 1},
            f"row_cache_rows .*{MAX_ROW_CACHE_ROWS + 1}",
        ),
        ({"device_pages": 2**27}, f"device_pages {2**27}"),
        (
            {"host_pages": 2**28, "row_cache_rows": 8},
            f"{2**28} pages in .*lower host_memory_gib",
        ),
    ],
)
def test_sizes_that_do_not_fit_are_refused(changes: dict[str, Any], named: str) -> None:
    """A page that straddles blocks of keys, a group of nothing, an id beyond 32 bits, or a
    row-cache row beyond 16."""
    with pytest.raises(ValueError, match=named):
        geometry(**changes)


def test_device_pages_that_row_ids_cannot_name() -> None:
    """A limit that is named and does not fit, or is less than what fits."""
    with pytest.raises(ValueError, match=r"set device_pages to at most \d+$") as caught:
        geometry(device_pages=1 << 30)
    most = int(str(caught.value).split(" at most ")[1])
    assert geometry(device_pages=most).device_pages == most
    with pytest.raises(ValueError, match="device_pages"):
        geometry(device_pages=most + 1)
