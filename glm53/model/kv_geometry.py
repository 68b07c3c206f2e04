"""The store's sizes for a model: what a cached row and an index key of it look like."""

from glm53.model.config import GLMConfig
from glm53.model.layer_plan import index_groups
from kvcache.geometry import KVGeometry
from pallas_kernels.common.row_format import E4M3_MAX, RowFormat, RowKind

_LEAST_ROW_SCALE = 1e-4
_LEAST_KEY_SCALE = 1e-4 / E4M3_MAX


def kv_geometry(
    config: GLMConfig,
    *,
    row_kind: RowKind,
    device_pages: int,
    max_model_len: int,
    max_sequences: int,
    num_devices: int = 1,
    rows_per_device: int = 64,
    with_mtp: bool = False,
    host_pages: int = 0,
    row_cache_rows: int = 0,
    staging_pages: int = 0,
) -> KVGeometry:
    """Sizes of a store.

    Args:
        config: the model.
        row_kind: format of rows and index keys.
        device_pages: pages of the device slab.
        max_model_len: longest sequence, in tokens.
        max_sequences: sequence slots.
        num_devices: devices of the mesh.
        rows_per_device: rows of a page on one device.
        with_mtp: keep the MTP layer's rows and index keys too.
        host_pages: pages of the host tier; without it every page stays on the device.
        row_cache_rows: rows that a sequence may keep on each device of pages that are not there.
        staging_pages: device pages that a prefill may stage such pages on.

    Raises:
        ValueError: a size is refused.
    """
    mtp_layers = config.num_nextn_predict_layers if with_mtp else 0
    rows_per_page = rows_per_device * num_devices
    return KVGeometry(
        group_layers=index_groups(config) + (1,) * mtp_layers,
        device_pages=device_pages,
        host_pages=host_pages,
        row_cache_rows=row_cache_rows,
        staging_pages=staging_pages,
        num_devices=num_devices,
        max_sequences=max_sequences,
        max_pages_per_sequence=-(-max_model_len // rows_per_page),
        rows_per_device=rows_per_device,
        row_format=RowFormat(
            row_kind, config.kv_lora_rank, config.qk_rope_head_dim, _LEAST_ROW_SCALE
        ),
        index_row_format=RowFormat(row_kind, config.index_head_dim, 0, _LEAST_KEY_SCALE),
    )
