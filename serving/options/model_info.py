"""Parts of a model and what fits in memory, computed from its config alone."""

import dataclasses
import math
from collections.abc import Iterable

from flax import nnx

from glm53.checkpoint.inventory import TensorSpec, tensor_inventory
from glm53.model.config import GLMConfig
from glm53.model.kv_geometry import kv_geometry
from glm53.model.params import abstract_model
from glm53.model.sharding import parameter_specs
from kvcache.device.store import MESH_AXIS
from kvcache.geometry import KVGeometry
from pallas_kernels.common.row_format import ROW_KINDS, RowKind
from serving.options.engine_options import MEMORY_FRACTION, check_count, resolve_max_model_len

_GIB = 1 << 30
ROUTED_EXPERTS = "routed experts"
MTP_LAYER = "MTP layer"
PARTS = (
    "embedding and head",
    "attention",
    "indexer",
    "dense MLP",
    ROUTED_EXPERTS,
    "shared experts",
    "router",
    "norms",
    MTP_LAYER,
)
"""Kinds of parameters. The MTP layer's are counted with it alone."""


@dataclasses.dataclass(frozen=True)
class Part:
    """Parameters of one kind.

    Attributes:
        name: one of `PARTS`.
        num_parameters: numbers, the scales of FP8 blocks not among them.
        num_bytes: bytes in the checkpoint's format, scales included.
    """

    name: str
    num_parameters: int
    num_bytes: int


@dataclasses.dataclass(frozen=True)
class CacheSize:
    """Size of the KV cache in one format of rows and index keys.

    Attributes:
        row_kind: the format.
        with_mtp: the MTP layer's rows and index keys are cached too.
        row_bytes: MLA rows of one token, all layers and devices.
        key_bytes: index keys of one token, all layers and devices.
        fitting_tokens: tokens in the whole pages that fit beside the weights; None where the
            memory is not known.
        fitting_sequences: sequences of `max_model_len` tokens that these pages hold, or None.
    """

    row_kind: RowKind
    with_mtp: bool
    row_bytes: int
    key_bytes: int
    fitting_tokens: int | None
    fitting_sequences: int | None

    @property
    def token_bytes(self) -> int:
        """Bytes of one token."""
        return self.row_bytes + self.key_bytes


@dataclasses.dataclass(frozen=True)
class ModelInfo:
    """Sizes of a model.

    Attributes:
        config: the model.
        num_tensors: tensors of its Hugging Face checkpoint.
        parts: parameters by kind, in the order of `PARTS`.
        active_parameters: what one token's pass through the trunk uses: all of it, the embedding
            and the head included, but only `num_experts_per_tok` of the routed experts.
        num_devices: devices that share the weights and the cache.
        device_weight_bytes: weights on each device, unquantised ones in the checkpoint's dtype.
        replicated_bytes: those of `device_weight_bytes` that every device holds a copy of.
        device_budget_bytes: memory of each device for weights and cache, or None.
        max_model_len: length of a sequence, in tokens.
        caches: cache sizes by format, without the MTP layer's part and then with it.
        refused_formats: why a format of rows cannot hold this model's.
    """

    config: GLMConfig
    num_tensors: int
    parts: tuple[Part, ...]
    active_parameters: int
    num_devices: int
    device_weight_bytes: int
    replicated_bytes: int
    device_budget_bytes: int | None
    max_model_len: int
    caches: tuple[CacheSize, ...]
    refused_formats: tuple[str, ...]

    @property
    def num_parameters(self) -> int:
        """Numbers of all parts."""
        return sum(part.num_parameters for part in self.parts)

    @property
    def num_bytes(self) -> int:
        """Bytes of all parts."""
        return sum(part.num_bytes for part in self.parts)

    @property
    def weights_fit(self) -> bool | None:
        """Whether the weights leave room for a cache; None where the memory is not known."""
        if self.device_budget_bytes is None:
            return None
        return self.device_weight_bytes < self.device_budget_bytes


def model_info(
    config: GLMConfig,
    *,
    memory_gib: int | float | None = None,
    num_devices: int = 1,
    max_model_len: int | None = None,
) -> ModelInfo:
    """Computes the sizes of a model.

    Args:
        config: the model.
        memory_gib: memory of each device, in GiB. The share of it that a store takes goes to
            weights and cache; the working memory of steps is not counted.
        num_devices: devices to shard over.
        max_model_len: length of a sequence, in tokens; None is the model's limit.

    Raises:
        ValueError: an argument is out of range, or the devices do not divide a parameter.
    """
    check_count("devices", num_devices)
    if max_model_len is not None:
        check_count("max_model_len", max_model_len)
    if memory_gib is not None and not 0 < memory_gib < math.inf:
        raise ValueError(f"memory_gib must be a positive, finite number, got {memory_gib!r}")
    max_model_len = resolve_max_model_len(config, max_model_len)
    # As it is loaded on an accelerator.
    config = config.replace(compute_dtype=config.weight_dtype)
    specs = tensor_inventory(config)
    parts = _parts(config, specs)
    sharded, replicated = _device_bytes(config, num_devices)
    budget = None if memory_gib is None else int(memory_gib * _GIB * MEMORY_FRACTION)
    free = None if budget is None else max(0, budget - sharded - replicated)
    caches, refused = _caches(config, num_devices, max_model_len, free)
    return ModelInfo(
        config=config,
        num_tensors=len(specs),
        parts=parts,
        active_parameters=_active_parameters(config, parts),
        num_devices=num_devices,
        device_weight_bytes=sharded + replicated,
        replicated_bytes=replicated,
        device_budget_bytes=budget,
        max_model_len=max_model_len,
        caches=caches,
        refused_formats=refused,
    )


def _parts(config: GLMConfig, specs: Iterable[TensorSpec]) -> tuple[Part, ...]:
    mtp_prefix = f"model.layers.{config.num_hidden_layers}."
    numbers: dict[str, int] = dict.fromkeys(PARTS, 0)
    sizes: dict[str, int] = dict.fromkeys(PARTS, 0)
    for spec in specs:
        name = MTP_LAYER if spec.name.startswith(mtp_prefix) else _part_name(spec.path)
        sizes[name] += spec.num_bytes
        if spec.path[-1] != "scale":
            numbers[name] += math.prod(spec.shape)
    return tuple(Part(name, numbers[name], sizes[name]) for name in PARTS)


def _part_name(path: tuple[str, ...]) -> str:
    """The kind of a parameter of the trunk, by its path in the tree."""
    if path[-2].endswith("norm"):
        return "norms"
    match path:
        case ("embed_tokens" | "lm_head", _):
            return "embedding and head"
        case ("layers", "self_attn", *_):
            return "attention"
        case ("layers", "indexer", *_):
            return "indexer"
        case ("layers", "dense_mlp", *_):
            return "dense MLP"
        case ("layers", "moe", "experts", *_):
            return ROUTED_EXPERTS
        case ("layers", "moe", "shared_experts", *_):
            return "shared experts"
        case ("layers", "moe", "gate", _):
            return "router"
    raise ValueError(f"parameter {'.'.join(path)} is of no known kind")


def _active_parameters(config: GLMConfig, parts: Iterable[Part]) -> int:
    active = 0
    for part in parts:
        if part.name == ROUTED_EXPERTS:
            active += part.num_parameters // config.n_routed_experts * config.num_experts_per_tok
        elif part.name != MTP_LAYER:
            active += part.num_parameters
    return active


def _device_bytes(config: GLMConfig, num_devices: int) -> tuple[int, int]:
    """Bytes on each device of the parameters that are sharded, and of those that are copied."""
    _, abstract = abstract_model(config)
    specs = dict(nnx.to_flat_state(parameter_specs(abstract)))
    sharded = replicated = 0
    for path, leaf in nnx.to_flat_state(abstract):
        shape, axes = leaf.get_value().shape, specs[path].get_value()
        size = leaf.get_value().size * leaf.get_value().dtype.itemsize
        if MESH_AXIS not in axes:
            replicated += size
            continue
        axis = axes.index(MESH_AXIS)
        if shape[axis] % num_devices:
            raise ValueError(
                f"{num_devices} devices do not divide axis {axis} of "
                f"{'.'.join(map(str, path))}, whose shape is {list(shape)}"
            )
        sharded += size // num_devices
    return sharded, replicated


def _caches(
    config: GLMConfig, num_devices: int, max_model_len: int, free: int | None
) -> tuple[tuple[CacheSize, ...], tuple[str, ...]]:
    """Sizes in every format that can hold the model's rows, and why others cannot."""
    caches, refused = [], []
    for with_mtp in (False, True)[: 1 + config.num_nextn_predict_layers]:
        for row_kind in ROW_KINDS:
            try:
                geometry = kv_geometry(
                    config,
                    row_kind=row_kind,
                    device_pages=1,
                    max_model_len=max_model_len,
                    max_sequences=1,
                    num_devices=num_devices,
                    with_mtp=with_mtp,
                )
            except ValueError as error:
                if not with_mtp:
                    refused.append(str(error))
                continue
            caches.append(_cache_size(geometry, row_kind, with_mtp, max_model_len, free))
    return tuple(caches), tuple(refused)


def _cache_size(
    geometry: KVGeometry, row_kind: RowKind, with_mtp: bool, max_model_len: int, free: int | None
) -> CacheSize:
    pages = None
    if free is not None:
        page_bytes = geometry.page_bytes + geometry.index_page_bytes
        pages = free * geometry.num_devices // page_bytes
    return CacheSize(
        row_kind=row_kind,
        with_mtp=with_mtp,
        row_bytes=geometry.page_bytes // geometry.rows_per_page,
        key_bytes=geometry.index_page_bytes // geometry.rows_per_page,
        fitting_tokens=None if pages is None else pages * geometry.rows_per_page,
        fitting_sequences=None if pages is None else pages // geometry.pages_for(max_model_len),
    )
