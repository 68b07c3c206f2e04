"""Options of the KV store, and the sizes that they come to on a machine."""

import dataclasses
import logging
import math
from pathlib import Path
from typing import Any, get_args

import jax
from jax.sharding import Mesh

from kvcache import KVGeometry
from kvcache.geometry import MAX_ROW_CACHE_ROWS
from kvcache.tiers.offload_policy import lease_reserve
from pallas_kernels.common.host_memory import (
    LIMIT_VARIABLE,
    limit_for,
    pinnable_bytes,
    reserve_host_memory,
)
from pallas_kernels.common.ring_copy import unsupported_rows
from serving.options.engine_options import EngineOptions, KVPolicy, check_count

logger = logging.getLogger(__name__)

_MAX_HOST_GIB = 1 << 20
_CPU_BYTES = 1 << 30  # of a store on a CPU, in each tier
_MEMORY_INFO, _FREE = Path("/proc/meminfo"), "MemAvailable:"
_HOST_SHARE = 0.5  # of the free host memory, for the host tier of accelerators
_HOT_SELECTIONS = 4  # selections that a sequence's row-cache rows hold
_WITHOUT_ROW_CACHE = ("resident", "swap")
_LEASE_SHARE = (
    4  # row-cache rows of a sequence, and staging, take at most this part of the device pages
)
MIN_DEVICE_PAGES = 4
"""With a host tier: two newest pages of a sequence, and two for its next step."""


def check_store_options(options: EngineOptions) -> None:
    """Refuses options of the store that no model and no machine could have.

    Raises:
        ValueError: an option is refused; the message names it.
    """
    for name in ("device_pages", "row_cache_rows"):
        value = getattr(options, name)
        if value is not None:
            check_count(name, value)
    if options.kv_policy not in (policies := get_args(KVPolicy)):
        raise ValueError(f"kv_policy must be one of {policies}, got {options.kv_policy!r}")
    _check_number("memory_fraction", options.memory_fraction, 0, 1)
    if options.host_memory_gib is not None:
        _check_number("host_memory_gib", options.host_memory_gib, 0, _MAX_HOST_GIB)
    for name, policies in (
        ("host_memory_gib", ["resident"]),
        ("row_cache_rows", _WITHOUT_ROW_CACHE),
    ):
        value = getattr(options, name)
        if value is not None and options.kv_policy in policies:
            raise ValueError(f"{name} {value} has no use with kv_policy {options.kv_policy!r}")
    if options.row_cache_rows is not None and options.row_cache_rows > MAX_ROW_CACHE_ROWS:
        raise ValueError(
            f"row_cache_rows must be at most {MAX_ROW_CACHE_ROWS}, got {options.row_cache_rows}"
        )


def page_options(options: EngineOptions) -> str:
    """The options that give a request more pages, for messages."""
    return "device_pages or host_memory_gib" if options.kv_policy == "hybrid" else "device_pages"


def reserve_for_store(options: EngineOptions, free_host_bytes: int) -> None:
    """Has jax pin as much host memory as the store may take, which it does only if it uses no
    device yet."""
    reserve_host_memory(_host_bytes(options, free_host_bytes, on_cpu=False))


def free_host_memory() -> int:
    """Bytes of host memory that are free or would be given back by the system's caches; 0 where
    they are not reported."""
    if not _MEMORY_INFO.is_file():
        return 0
    lines = _MEMORY_INFO.read_text().splitlines()
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith(_FREE)), 0)


def resolve_geometry(
    one_page: KVGeometry,
    options: EngineOptions,
    free_host_bytes: int,
    mesh: Mesh,
    index_topk: int,
) -> KVGeometry:
    """The store's sizes.

    Sizes that are left open are as large as memory allows and all sequences can use. There is no
    host tier if they leave nothing for it, or the policy is "resident".

    Args:
        one_page: the store with one page.
        options: what the caller chose.
        free_host_bytes: host memory that was free before the weights were read.
        mesh: where the store lies; weights are there already.
        index_topk: rows that a token selects.

    Raises:
        ValueError: memory is too small for one sequence, the device does not report its memory, or
            the device pages are too few for a host tier, or jax may not pin so much host memory.
        NotImplementedError: rows that no kernel can read in host memory, on a GPU; or a host tier
            on another accelerator.
    """
    needed = one_page.max_sequences * one_page.max_pages_per_sequence
    platform = mesh.devices.flat[0].platform
    on_cpu = platform == "cpu"
    if options.kv_policy != "resident" and not on_cpu:
        _check_kernels(one_page, platform, options.kv_policy)
    host_bytes = _host_bytes(options, free_host_bytes, on_cpu)
    if options.host_memory_gib is None and not on_cpu and host_bytes > pinnable_bytes():
        host_bytes = pinnable_bytes()
        logger.warning(
            "host memory for the KV store is %.0f GiB, all that jax was started to pin; %s sets it",
            host_bytes / 2**30,
            LIMIT_VARIABLE,
        )
    if options.device_pages is None:
        device_bytes = sum(
            _free_bytes(device, options.memory_fraction) for device in mesh.devices.flat
        )
        device_pages, host_pages = _fitting_pages(
            one_page,
            options,
            device_bytes,
            host_bytes,
            "set device_pages" if on_cpu else "raise memory_fraction",
        )
    else:
        device_pages, host_pages = options.device_pages, host_bytes // one_page.page_bytes
        # Room for a copy of each page: row-cache rows and staging take places on the device.
        host_pages = min(host_pages, needed) if needed > device_pages else 0
    asked = options.host_memory_gib is not None and needed > device_pages
    if asked and host_bytes < one_page.page_bytes:
        raise ValueError(
            f"host_memory_gib {options.host_memory_gib} is less than a page of "
            f"{one_page.page_bytes / 2**30:.3g} GiB: raise it or use kv_policy='resident'"
        )
    geometry = dataclasses.replace(one_page, device_pages=device_pages)
    if host_pages:
        if device_pages < MIN_DEVICE_PAGES:
            raise ValueError(
                f"device_pages must be at least {MIN_DEVICE_PAGES} with pages in host memory, "
                f"got {device_pages}: raise it or use kv_policy='resident'"
            )
        geometry = dataclasses.replace(geometry, host_pages=host_pages)
        if options.kv_policy == "hybrid":
            geometry = _with_row_cache_rows(geometry, options.row_cache_rows, index_topk)
        if not on_cpu and geometry.host_bytes > pinnable_bytes():
            raise ValueError(
                f"host_memory_gib {options.host_memory_gib} is more than jax was started with: "
                f"set it to at most {pinnable_bytes() >> 30}, or set "
                f"{LIMIT_VARIABLE}={limit_for(geometry.host_bytes)} before jax uses a device"
            )
    logger.info(
        "KV store: %d pages of %d tokens on the device, %.2f GiB; %d in host memory, %.2f GiB",
        device_pages,
        geometry.rows_per_page,
        geometry.device_bytes / 2**30,
        host_pages,
        geometry.host_bytes / 2**30,
    )
    return geometry


def _fitting_pages(
    one_page: KVGeometry, options: EngineOptions, device_bytes: int, host_bytes: int, more: str
) -> tuple[int, int]:
    """Device and host pages for which there is memory, as far as all sequences can use them.

    `more` says how the devices could hold more.
    """
    needed = one_page.max_sequences * one_page.max_pages_per_sequence
    without_host, _ = one_page.pages_within(device_bytes, 0)
    if without_host >= needed:
        return needed, 0
    least = MIN_DEVICE_PAGES
    if options.kv_policy == "swap" and one_page.max_pages_per_sequence <= without_host:
        # All pages of a sequence that runs are on the devices.
        least = max(least, one_page.max_pages_per_sequence)
    wanted = min(host_bytes // one_page.page_bytes, needed)
    device_pages, host_pages = one_page.pages_within(
        device_bytes, wanted * one_page.page_bytes, least
    )
    if options.kv_policy == "hybrid" and host_pages == wanted:
        more += " or raise host_memory_gib"
    _check_longest(one_page, options.kv_policy, device_pages, host_pages, more)
    if options.host_memory_gib is not None and host_pages < wanted:
        given = f"host_memory_gib {options.host_memory_gib}"
        if not host_pages:
            raise ValueError(
                f"{given} needs {least} pages on the devices, beside the index keys "
                f"of its own, and there is memory for {without_host}: leave it out, and use "
                "kv_policy='resident'"
            )
        most = math.floor(host_pages * one_page.page_bytes / 2**30 * 1e6) / 1e6
        raise ValueError(
            f"{given} holds {wanted} pages, whose index keys leave fewer than {least} pages on the "
            f"devices: set host_memory_gib to at most {most}"
        )
    return device_pages, host_pages


def _check_longest(
    one_page: KVGeometry, kv_policy: KVPolicy, device_pages: int, host_pages: int, more: str
) -> None:
    """Refuses memory that does not hold the longest sequence."""
    usable, needed = device_pages, one_page.max_pages_per_sequence
    there = f"{device_pages} pages on the devices"
    if kv_policy == "hybrid":
        usable += host_pages
        there += f" and {host_pages} in host memory"
    if usable < needed:
        rows = one_page.rows_per_page
        lower = f"set max_model_len to at most {usable * rows} or " if usable else ""
        raise ValueError(
            f"max_model_len needs {needed} pages of {rows} tokens with kv_policy {kv_policy!r}, "
            f"there is memory for {there}: {lower}{more}"
        )


def max_step_rows(geometry: KVGeometry, max_num_batched_tokens: int) -> int:
    """Most tokens of a prefill step: their pages must lie on the device, beside two others."""
    if not geometry.has_host_tier:
        return max_num_batched_tokens
    pages = geometry.device_pages - MIN_DEVICE_PAGES + 1
    return min(max_num_batched_tokens, pages * geometry.rows_per_page)


def _with_row_cache_rows(
    geometry: KVGeometry, row_cache_rows: int | None, index_topk: int
) -> KVGeometry:
    device_pages = geometry.device_pages
    max_pages = max(device_pages // _LEASE_SHARE, 1)
    if row_cache_rows is None:
        wanted = -(-_HOT_SELECTIONS * index_topk // geometry.num_devices)
        row_cache_rows = min(wanted, max_pages * geometry.rows_per_device, MAX_ROW_CACHE_ROWS)
    row_cache_pages = -(-row_cache_rows // geometry.rows_per_device)
    room = device_pages - MIN_DEVICE_PAGES // 2 - lease_reserve(device_pages, 1)
    if row_cache_pages > room:
        raise ValueError(
            f"row_cache_rows {row_cache_rows} takes {row_cache_pages} of {device_pages} pages on "
            f"the devices, which leave {room} for it: set row_cache_rows to at most "
            f"{room * geometry.rows_per_device} or raise device_pages"
        )
    # A layer of a page is staged at a time: a staging page has room for one of each layer.
    staging_pages = -(-geometry.max_pages_per_sequence // geometry.num_layers)
    return dataclasses.replace(
        geometry,
        row_cache_rows=row_cache_rows,
        staging_pages=min(staging_pages, max_pages),
    )


def _check_kernels(geometry: KVGeometry, platform: str, policy: KVPolicy) -> None:
    """Refuses a host tier whose rows no kernel can move."""
    if platform != "gpu":
        raise NotImplementedError(
            f"kv_policy {policy!r} has no kernels for {platform}: use kv_policy='resident'"
        )
    row = geometry.row_format
    unsupported = unsupported_rows(jax.ShapeDtypeStruct((row.width,), row.dtype))
    if unsupported:
        raise NotImplementedError(
            f"kv_policy {policy!r} has no kernels: {unsupported}: use another kv_cache_dtype or "
            "kv_policy='resident'"
        )


def _host_bytes(options: EngineOptions, free_host_bytes: int, on_cpu: bool) -> int:
    if options.kv_policy == "resident":
        return 0
    if options.host_memory_gib is not None:
        return int(options.host_memory_gib * 2**30)
    if on_cpu:
        return _CPU_BYTES
    return int(free_host_bytes * _HOST_SHARE)


def _free_bytes(device: Any, memory_fraction: float | int) -> int:
    if device.platform == "cpu":
        return _CPU_BYTES
    stats = device.memory_stats() or {}
    if "bytes_limit" not in stats:
        raise ValueError(f"{device} does not report its memory: set device_pages")
    return max(int(stats["bytes_limit"] * memory_fraction) - stats["bytes_in_use"], 0)


def _check_number(name: str, value: object, above: float | int, most: float | int) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not above < value <= most:
        raise ValueError(f"{name} must be a number above {above}, at most {most}, got {value!r}")
