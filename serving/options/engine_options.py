"""The options of an engine, and what they come to for a model on a machine."""

import dataclasses
import importlib.resources
from pathlib import Path
from typing import Literal

from glm53.model.config import GLMConfig
from pallas_kernels.common.row_format import ROW_KINDS, RowKind
from serving.options.other_names import ENGINE_NAMES, FORMAT_NAMES, explain_unknown_names
from serving.options.plain_values import plain_value

BUILT_IN_MODEL = "tiny"

DType = Literal["auto", "float32", "bfloat16"]
CacheDType = Literal["auto", "float32", "bfloat16", "fp8"]
ActivationQuantization = Literal["auto", "none", "fp8_1x128"]
KVPolicy = Literal["hybrid", "resident", "swap"]

MEMORY_FRACTION = 0.92

_DTYPES = ("auto", "float32", "bfloat16")
_BATCHED_TOKENS, _BATCHED_TOKENS_ON_CPU = 8192, 512


@explain_unknown_names(ENGINE_NAMES)
@dataclasses.dataclass(frozen=True)
class EngineOptions:
    """Options with which an engine runs a model.

    They are written here once: `LLM` takes them as keyword arguments, and the command line as flags
    with the texts below.

    Attributes:
        model: "tiny", which is built in, or a checkpoint directory.
        dtype: "float32" or "bfloat16" for activations and unquantised weights; "auto" is the
            checkpoint's dtype, and float32 on a CPU, where bfloat16 is slower.
        kv_cache_dtype: "float32", "bfloat16" or "fp8" for cached rows; "auto" is the dtype of
            activations.
        max_model_len: longest prompt and output together, in tokens; None is the model's limit.
        latent_norm_eps: epsilon of the latent norms, with which Hugging Face transformers computes
            as 1e-6; None is the config's rms_norm_eps.
        activation_quantization: quantisation of the activations that FP8 weights multiply, "none"
            or "fp8_1x128"; "auto" is fp8_1x128 for FP8 weights on a GPU, and none elsewhere.
        tensor_parallel_size: devices to shard the model and the store over.
        max_num_seqs: most sequences that decode together.
        max_num_batched_tokens: most prompt tokens of one step, for which a running sequence waits
            between two of its tokens; None is 8,192, and 512 on a CPU.
        enable_prefix_caching: keep the rows of requests that are done, and continue from them where
            a prompt begins alike; no answer changes.
        device_pages: pages of the store on the devices; None is as many as fit.
        host_memory_gib: host memory for pages that the devices have no room for, in GiB; None is
            half of what is free, and 1 on a CPU.
        kv_policy: "hybrid" moves pages to host memory when room on the devices runs short, and
            reads from there what a token selects; "resident" keeps every page on the devices;
            "swap" keeps every page of the sequences that run on the devices, and moves whole
            sequences to host memory and back.
        row_cache_rows: rows of pages in host memory that a sequence keeps on each device, with
            "hybrid", where no number changes an answer; None is four selections, as far as there is
            room.
        memory_fraction: share of each device's memory for weights and store; on a CPU the store
            takes 1 GiB a device.

    Raises:
        TypeError: an unknown option; the message says what it is called here, if it is known from
            elsewhere.
        ValueError: a count, a flag or the model is invalid; the message names it. All else is
            refused when the engine is made.
    """

    model: str | Path = BUILT_IN_MODEL
    _: dataclasses.KW_ONLY
    dtype: DType = "auto"
    kv_cache_dtype: CacheDType = "auto"
    max_model_len: int | None = None
    latent_norm_eps: float | None = None
    activation_quantization: ActivationQuantization = "auto"
    tensor_parallel_size: int = 1
    max_num_seqs: int = 256
    max_num_batched_tokens: int | None = None
    enable_prefix_caching: bool = True
    device_pages: int | None = None
    host_memory_gib: float | int | None = None
    kv_policy: KVPolicy = "hybrid"
    row_cache_rows: int | None = None
    memory_fraction: float | int = MEMORY_FRACTION

    def __post_init__(self) -> None:
        for name in self.__dataclass_fields__:
            object.__setattr__(self, name, plain_value(getattr(self, name)))
        # An empty path would be the current directory.
        if not isinstance(self.model, str | Path) or not str(self.model):
            raise ValueError(f"model must be text or a path, got {self.model!r}")
        for name in ("tensor_parallel_size", "max_num_seqs"):
            check_count(name, getattr(self, name))
        for name in ("max_num_batched_tokens", "max_model_len"):
            if getattr(self, name) is not None:
                check_count(name, getattr(self, name))
        check_flag("enable_prefix_caching", self.enable_prefix_caching)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LLMOptions(EngineOptions):
    """Options of an `LLM`: those of its engine, and when it compiles.

    Attributes:
        warm_up: compile everything at once, rather than each part when it is first used.
    """

    warm_up: bool = False


def resolve_batched_tokens(max_num_batched_tokens: int | None, on_cpu: bool) -> int:
    """The most prompt tokens of a step."""
    if max_num_batched_tokens is not None:
        return max_num_batched_tokens
    return _BATCHED_TOKENS_ON_CPU if on_cpu else _BATCHED_TOKENS


def model_path(model: str | Path) -> Path:
    """The directory of a model: the built-in one by name, or a path.

    Raises:
        FileNotFoundError: neither.
    """
    if model == BUILT_IN_MODEL:
        return Path(str(importlib.resources.files("glm53") / "built_in" / BUILT_IN_MODEL))
    if Path(model) == Path(BUILT_IN_MODEL) and not Path(model).is_dir():
        raise FileNotFoundError(
            f"model {model!r} is not a directory: the built-in model is the text '{BUILT_IN_MODEL}'"
        )
    if not Path(model).is_dir():
        raise FileNotFoundError(
            f"model {str(model)!r} is neither a directory nor the built-in '{BUILT_IN_MODEL}'"
        )
    return Path(model)


def check_count(name: str, value: object) -> None:
    """Refuses what is no positive int32, with a ValueError that names the option."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name} must be a positive integer, got {value!r}")
    if value >= 1 << 31:
        raise ValueError(f"{name} must be below 2**31, got {value}")


def check_flag(name: str, value: object) -> None:
    """Refuses what is neither true nor false, with a ValueError that names the option."""
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be True or False, got {value!r}")


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
    if not isinstance(dtype, str) or dtype not in _DTYPES:
        raise ValueError(f"dtype must be one of {_DTYPES}, got {_format_name(dtype)}")
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
        if isinstance(kind, str) and kind == known:
            return known
    raise ValueError(
        f"kv_cache_dtype must be 'auto' or one of {ROW_KINDS}, got {_format_name(kv_cache_dtype)}"
    )


def _format_name(value: object) -> str:
    """A value that is no format, and what it is called here if it is known from elsewhere."""
    if isinstance(value, str):
        hint = FORMAT_NAMES.get(value)
    else:  # such as the types of numpy, jax and torch
        name = str(getattr(value, "__name__", value)).removeprefix("torch.")
        hint = FORMAT_NAMES.get(name, f"pass the text {name!r}" if name in ROW_KINDS else None)
    return f"{value!r}: {hint}" if hint else repr(value)
