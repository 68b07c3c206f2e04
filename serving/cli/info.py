"""`glm53 info`: what a model is made of, and what fits in memory."""

import argparse
from collections.abc import Iterator

from glm53.checkpoint.source import read_config
from glm53.model.config import GLMConfig
from glm53.model.presets import preset, preset_names
from serving.cli.process import check_standard_output, print_output
from serving.options.engine_options import model_path
from serving.options.model_info import MTP_LAYER, CacheSize, ModelInfo, model_info


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the subcommand's arguments."""
    parser.description = (
        "Shows a model's sizes, from its config alone: layers, parameters, and the bytes of its "
        "weights and of a cached token. With --memory-gib, also what fits."
    )
    parser.add_argument(
        "model", help="checkpoint directory, 'tiny', or the name of a preset such as glm-5.3"
    )
    parser.add_argument(
        "--memory-gib",
        type=float,
        help="memory per device, in GiB (if omitted, what fits is not reported)",
    )
    parser.add_argument(
        "--devices",
        type=int,
        default=1,
        help="number of devices to shard over (default: %(default)s)",
    )
    parser.add_argument(
        "--max-model-len",
        type=int,
        help="maximum length of a sequence, in tokens (default: the model's limit)",
    )
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    check_standard_output()
    info = model_info(
        _config(options.model),
        memory_gib=options.memory_gib,
        num_devices=options.devices,
        max_model_len=options.max_model_len,
    )
    for part in (_architecture, _parameters, _weights, _caches):
        print_output("\n".join(part(info)))
    return 0


def _config(model: str) -> GLMConfig:
    """A preset by its name, or the config of a checkpoint."""
    if model in preset_names():
        return preset(model)
    try:
        path = model_path(model)
    except FileNotFoundError as error:
        raise FileNotFoundError(f"{error}, nor a preset ({', '.join(preset_names())})") from error
    return read_config(path)


def _architecture(info: ModelInfo) -> Iterator[str]:
    config = info.config
    full, dense = config.indexer_types.count("full"), config.num_dense_layers
    layers = config.num_hidden_layers
    yield (
        f"layers      {layers}: {dense} dense and {layers - dense} sparse; {full} with an indexer "
        f"and {layers - full} that share a selection; {config.num_nextn_predict_layers} MTP"
    )
    yield (
        f"experts     {config.n_routed_experts} routed, {config.num_experts_per_tok} a token, "
        f"{config.n_shared_experts} shared"
    )
    yield f"attention   {config.num_attention_heads} heads, {config.index_topk:,} rows a token"
    yield f"context     {config.max_position_embeddings:,} tokens"


def _parameters(info: ModelInfo) -> Iterator[str]:
    (mtp,) = (part.num_parameters for part in info.parts if part.name == MTP_LAYER)
    yield (
        f"parameters  {info.num_parameters:,}: {info.num_parameters - mtp:,} in the trunk "
        f"({info.active_parameters:,} active a token) and {mtp:,} in the MTP layer"
    )
    yield ""
    yield f"{'checkpoint':20}{'parameters':>20}{'bytes':>20}"
    for part in info.parts:
        yield f"{part.name:20}{part.num_parameters:>20,}{part.num_bytes:>20,}"
    yield f"{'total':20}{info.num_parameters:>20,}{info.num_bytes:>20,}"
    yield f"{info.num_tensors:,} tensors, {_format(info.config)}"


def _format(config: GLMConfig) -> str:
    plain = {"float32": "F32", "bfloat16": "BF16"}[config.weight_dtype]
    return f"FP8 matrices, others {plain}" if config.fp8_weights else plain


def _weights(info: ModelInfo) -> Iterator[str]:
    yield ""
    yield (
        f"weights a device, of {info.num_devices}: {_gib(info.device_weight_bytes)}, of which "
        f"{_gib(info.replicated_bytes)} are on every device"
    )
    if info.device_budget_bytes is None:
        return
    if not info.weights_fit:
        yield (
            f"The weights alone do not fit: a device has {_gib(info.device_budget_bytes)} for "
            "weights and cache; use more devices or memory"
        )
        return
    free = info.device_budget_bytes - info.device_weight_bytes
    yield f"left for the cache: {_gib(free)} a device"


def _caches(info: ModelInfo) -> Iterator[str]:
    yield ""
    header = f"{'cache, bytes a token':22}{'MLA rows':>12}{'index keys':>12}{'total':>12}"
    if info.weights_fit:
        header += f"{'tokens fit':>16}   sequences of {info.max_model_len:,}"
    yield header
    for cache in info.caches:
        yield _cache_line(cache, bool(info.weights_fit))
    yield from info.refused_formats


def _cache_line(cache: CacheSize, with_fit: bool) -> str:
    name = f"{cache.row_kind}{' with MTP' if cache.with_mtp else ''}"
    line = f"{name:22}{cache.row_bytes:>12,}{cache.key_bytes:>12,}{cache.token_bytes:>12,}"
    if with_fit:
        line += f"{cache.fitting_tokens:>16,}   {cache.fitting_sequences:,}"
    return line


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / (1 << 30):,.2f} GiB"
