"""The store's sizes on GPUs, which are not there: devices that only tell their memory."""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from glm53.model.kv_geometry import kv_geometry
from glm53.model.presets import preset
from kvcache import KVGeometry
from pallas_kernels.common.host_memory import LIMIT_VARIABLE
from pallas_kernels.common.row_format import RowKind
from serving.options.engine_options import MEMORY_FRACTION, EngineOptions
from serving.options.store_options import (
    MIN_DEVICE_PAGES,
    check_store_options,
    free_host_memory,
    reserve_for_store,
    resolve_geometry,
)


def resolve(
    model: str = "glm-5.3",
    row_kind: RowKind = "fp8",
    platform: str = "gpu",
    gib_in_use: int = 90,
    bytes_free: int | None = None,
    max_model_len: int | None = None,
    max_sequences: int = 8,
    **options: Any,
) -> KVGeometry:
    config = preset(model)
    one_page = kv_geometry(
        config,
        row_kind=row_kind,
        device_pages=1,
        max_model_len=max_model_len or (4096 if model == "test-small" else 1 << 20),
        max_sequences=max_sequences,
        num_devices=8,
    )
    stats = {"bytes_limit": 140 << 30, "bytes_in_use": gib_in_use << 30}
    if bytes_free is not None:
        stats["bytes_in_use"] = int(stats["bytes_limit"] * MEMORY_FRACTION) - bytes_free
    device = SimpleNamespace(platform=platform, memory_stats=lambda: stats)
    mesh: Any = SimpleNamespace(devices=np.array([device] * 8))
    engine_options = EngineOptions(**dict[str, Any](host_memory_gib=40) | options)
    check_store_options(engine_options)
    return resolve_geometry(one_page, engine_options, free_host_memory(), mesh, config.index_topk)


@pytest.mark.usefixtures("as_a_user")
def test_hybrid_on_gpus() -> None:
    """A host tier that is refused where there are kernels for it."""
    geometry = resolve()
    assert geometry.host_pages == 40 * 2**30 // geometry.page_bytes
    assert geometry.row_cache_rows == 1024


@pytest.mark.usefixtures("as_a_user")
def test_host_memory_that_jax_may_not_pin(monkeypatch: pytest.MonkeyPatch) -> None:
    """A store that fails to be allocated, with a message that does not tell what to do."""
    monkeypatch.delenv(LIMIT_VARIABLE, raising=False)
    with pytest.raises(ValueError, match=f"host_memory_gib 100 .*set {LIMIT_VARIABLE}=104 before"):
        resolve(host_memory_gib=100)
    monkeypatch.setenv(LIMIT_VARIABLE, "104")
    assert resolve(host_memory_gib=100).host_bytes > 99 << 30
    # Left open, it is no more than may be pinned.
    monkeypatch.setenv(LIMIT_VARIABLE, "5")
    assert resolve(host_memory_gib=None).host_bytes <= 1 << 30
    monkeypatch.setenv(LIMIT_VARIABLE, "2")
    assert resolve(host_memory_gib=None, device_pages=100).host_pages == 0


@pytest.mark.usefixtures("as_a_user")
def test_devices_full_of_weights() -> None:
    """Host memory that is blamed where the devices have no room."""
    message = "memory for 0 pages on the devices and 0 in host memory: raise memory_fraction$"
    with pytest.raises(ValueError, match=message):
        resolve(gib_in_use=139)


@pytest.mark.usefixtures("as_a_user")
@pytest.mark.parametrize("kv_policy", ["hybrid", "swap"])
@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_host_memory_that_the_devices_have_no_keys_for(platform: str, kv_policy: str) -> None:
    """Other options are blamed for it, or the value that is named does not fit either."""
    sizes: dict[str, Any] = {"model": "test-small", "row_kind": "float32", "platform": platform}
    sizes |= {"gib_in_use": 128, "max_sequences": 1 << 14, "kv_policy": kv_policy}
    with pytest.raises(ValueError, match=r"^host_memory_gib 60 .*to at most [\d.]+$") as caught:
        resolve(host_memory_gib=60, **sizes)
    most = float(str(caught.value).split()[-1])
    assert 20 < most < 40
    fitting = resolve(host_memory_gib=most, **sizes)
    # A sequence that runs has all its pages on the devices with "swap".
    least = MIN_DEVICE_PAGES if kv_policy == "hybrid" else fitting.max_pages_per_sequence
    assert fitting.device_pages == least
    assert most - 1e-3 < fitting.host_bytes / 2**30 <= most
    # Left open, it is as much as there are keys for.
    assert resolve(host_memory_gib=None, **sizes).device_pages >= MIN_DEVICE_PAGES


@pytest.mark.usefixtures("as_a_user")
def test_host_memory_beside_too_few_device_pages() -> None:
    """An option that is dropped without a word."""
    sizes: dict[str, Any] = {"model": "test-small", "row_kind": "float32", "max_model_len": 64}
    message = "host_memory_gib 1 needs 4 pages on the devices.*memory for 3: .*'resident'"
    with pytest.raises(ValueError, match=message):
        resolve(host_memory_gib=1, bytes_free=270_000, **sizes)
    resident = resolve(host_memory_gib=None, kv_policy="resident", bytes_free=270_000, **sizes)
    assert (resident.device_pages, resident.host_pages) == (3, 0)


@pytest.mark.usefixtures("as_a_user")
def test_limits_that_are_named_fit() -> None:
    """A longest sequence or row-cache rows for which the limit that the message names is too
    much."""
    with pytest.raises(ValueError, match=r"set max_model_len to at most \d+ or raise") as caught:
        resolve(kv_policy="swap", gib_in_use=124)
    longest = int(re.findall("at most (\\d+)", str(caught.value))[0])
    assert 0 < longest < 1 << 20
    assert resolve(kv_policy="swap", gib_in_use=124, max_model_len=longest).host_pages > 0
    # Longer ones fit beside less host memory.
    with pytest.raises(ValueError, match=r"host_memory_gib 40 .*to at most"):
        resolve(kv_policy="swap", gib_in_use=124, max_model_len=longest + 1)
    with pytest.raises(
        ValueError, match=r"row_cache_rows 30000 .*set row_cache_rows to at most \d+"
    ) as caught:
        resolve(device_pages=100, row_cache_rows=30_000)
    row_cache_rows = int(re.findall("at most (\\d+)", str(caught.value))[0])
    assert resolve(device_pages=100, row_cache_rows=row_cache_rows).row_cache_rows == row_cache_rows
    with pytest.raises(ValueError, match="row_cache_rows"):
        resolve(device_pages=100, row_cache_rows=row_cache_rows + 1)


def test_systems_that_do_not_tell_their_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error although nothing asks how much memory is free."""
    monkeypatch.setattr("serving.options.store_options._MEMORY_INFO", Path("/nowhere"))
    assert free_host_memory() == 0
    reserve_for_store(EngineOptions(), 0)


@pytest.mark.usefixtures("as_a_user")
def test_what_has_no_kernel() -> None:
    """A program that XLA refuses with an error from deep within, for want of a kernel."""
    with pytest.raises(NotImplementedError, match="'hybrid' has no kernels for tpu"):
        resolve(platform="tpu")
    with pytest.raises(NotImplementedError, match=r"rows of 52 bytes.*kv_cache_dtype"):
        resolve("test-small", "fp8")
    assert resolve("test-small", "float32").num_layers == 7
    assert resolve(host_memory_gib=None, kv_policy="resident").host_pages == 0


@pytest.mark.usefixtures("as_a_user")
def test_swap() -> None:
    """A longest request that no device could hold at once, or row-cache rows that nothing reads."""
    assert resolve(kv_policy="swap").row_cache_rows == 0
    assert resolve(gib_in_use=124).host_pages > 0
    with pytest.raises(ValueError, match=r"with kv_policy 'swap'.*: set max_model_len to at most"):
        resolve(kv_policy="swap", gib_in_use=124)
    with pytest.raises(ValueError, match="row_cache_rows 64 has no use with kv_policy 'swap'"):
        resolve(kv_policy="swap", row_cache_rows=64)
