"""What the options of an `LLM` come to for a model on a machine."""

import importlib.resources
from pathlib import Path

from glm53.config import GLMConfig
from pallas_kernels.row_format import ROW_KINDS, RowKind

BUILT_IN_MODEL = "tiny"

_DTYPES = ("auto", "float32", "bfloat16")


def model_path(model: str | Path) -> Path:
    """The directory of a model: the built-in one by name, or a path.

    Raises:
        FileNotFoundError: neither.
    """
    if model == BUILT_IN_MODEL:
        return Path(str(importlib.resources.files("glm53") / "models" / BUILT_IN_MODEL))
    if not Path(model).is_dir():
        raise FileNotFoundError(
            f"model {str(model)!r} is neither a directory nor the built-in '{BUILT_IN_MODEL}'"
        )
    return Path(model)


def check_count(name: str, value: object) -> None:
    """Refuses what is no positive integer, with a ValueError that names the option."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name} must be a positive integer, got {value!r}")


def resolve_numerics(
    config: GLMConfig,
    dtype: str,
    latent_norm_eps: float | None,
    activation_quantization: str,
    on_cpu: bool,
) -> GLMConfig:
    """The config with the numerics that the options ask for.

    Raises:
        ValueError: an option is refused.
    """
    if dtype not in _DTYPES:
        raise ValueError(f"dtype must be one of {_DTYPES}, got {dtype!r}")
    if activation_quantization not in ("auto", "none", "fp8_1x128"):
        raise ValueError(
            "activation_quantization must be 'auto', 'none' or 'fp8_1x128', got "
            f"{activation_quantization!r}"
        )
    if activation_quantization == "fp8_1x128" and not config.fp8_weights:
        raise ValueError("activation_quantization 'fp8_1x128' needs a checkpoint with FP8 weights")
    if dtype == "auto":
        dtype = "float32" if on_cpu else config.weight_dtype
    if activation_quantization == "auto":
        quantize = config.fp8_weights and not on_cpu
        activation_quantization = "fp8_1x128" if quantize else "none"
    return config.replace(
        compute_dtype=dtype,
        latent_norm_eps=config.latent_norm_eps if latent_norm_eps is None else latent_norm_eps,
        activation_quantization=activation_quantization,
    )


def resolve_max_model_len(config: GLMConfig, max_model_len: int | None) -> int:
    """The longest sequence, in tokens; a ValueError where the model cannot have it."""
    limit = config.max_position_embeddings
    if max_model_len is not None and max_model_len > limit:
        raise ValueError(
            f"max_model_len {max_model_len} exceeds the model's max_position_embeddings {limit}"
        )
    return max_model_len or limit


def resolve_row_kind(kv_cache_dtype: str, compute_dtype: str) -> RowKind:
    """The format of cached rows; a ValueError for one that there is not."""
    kind = compute_dtype if kv_cache_dtype == "auto" else kv_cache_dtype
    for known in ROW_KINDS:
        if kind == known:
            return known
    raise ValueError(f"kv_cache_dtype must be 'auto' or one of {ROW_KINDS}, got {kv_cache_dtype!r}")
