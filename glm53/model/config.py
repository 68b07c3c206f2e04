"""The one frozen configuration of the model, read from a Hugging Face `config.json`.

The model is GLM-5's (arXiv:2602.15763).

Decisions:
* What the file says twice must agree; what this implementation does not compute is refused by name.
* The schedule of indexers is always held as the explicit list `indexer_types`.
* `latent_norm_eps` defaults to `rms_norm_eps`, the value that serving engines use.
"""

import dataclasses
import json
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeGuard

FloatType = Literal["float32", "bfloat16"]
FLOAT_TYPES = ("float32", "bfloat16")
MODEL_TYPE = "glm_moe_dsa"
FP8_BLOCK = 128
FP8_QUANTIZATION: Mapping[str, Any] = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [FP8_BLOCK, FP8_BLOCK],
}
"""`quantization_config` of a `config.json` with block-FP8 weights."""

# Settings that change the arithmetic and have one supported value; absent or null means that value.
_SUPPORTED: dict[str, tuple[Any, ...]] = {
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "hidden_act": ("silu",),
    "tie_word_embeddings": (False,),
    "scoring_func": ("sigmoid",),
    "topk_method": ("noaux_tc",),
    "norm_topk_prob": (True,),
    "n_group": (1,),
    "topk_group": (1,),
    "moe_layer_freq": (1,),
    "rope_interleave": (True,),
    "indexer_rope_interleave": (True,),
    "rope_scaling": (),
    "partial_rotary_factor": (1.0, 1),
    "moe_router_dtype": ("float32",),
}

_SIZES = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "q_lora_rank",
    "kv_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
    "index_n_heads",
    "index_head_dim",
    "index_topk",
    "intermediate_size",
    "moe_intermediate_size",
    "n_routed_experts",
    "num_experts_per_tok",
    "n_shared_experts",
    "max_position_embeddings",
)
_NUMBERS = ("routed_scaling_factor", "rope_theta", "rms_norm_eps", "latent_norm_eps")
_FLAGS = ("index_share_for_mtp_iteration", "fp8_weights")
_INDEXER_TYPES = ("full", "shared")
_MLP_LAYER_TYPES = ("dense", "sparse")
_INT32_MAX = 2**31 - 1
_FLOAT32_MAX = 3.4028234663852886e38
_MAX_LAYERS = 10_000


@dataclasses.dataclass(frozen=True, kw_only=True)
class GLMConfig:
    """Sizes, schedules and numerics of a `glm_moe_dsa` model. Hashable, so it can be static in jit.

    Attributes that are not a plain Hugging Face field:
        indexer_types: "full" or "shared" for each trunk layer; a shared layer reuses the selection
            of the nearest full layer before it.
        mlp_layer_types: "dense" or "sparse" for each trunk layer.
        num_nextn_predict_layers: MTP layers, 0 or 1. An MTP layer has its own indexer and experts.
        eos_token_ids: ids that end a generation, possibly none.
        weight_dtype: dtype of the unquantised tensors on disk.
        fp8_weights: matrices are block-FP8 (e4m3 with one float32 scale per 128 x 128 block).
        compute_dtype: dtype of activations and of unquantised matrices in memory.
        latent_norm_eps: epsilon of `q_a_layernorm` and `kv_a_layernorm`.
        activation_quantization: "fp8_1x128" rounds the inputs of FP8 matrices to e4m3 in groups of
            128 along the contracted axis.

    Raises:
        ValueError: a field is out of range or two fields disagree; the message names them.
    """

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    indexer_types: tuple[str, ...]
    mlp_layer_types: tuple[str, ...]
    intermediate_size: int
    moe_intermediate_size: int
    n_routed_experts: int
    num_experts_per_tok: int
    n_shared_experts: int
    routed_scaling_factor: float
    rope_theta: float
    max_position_embeddings: int
    rms_norm_eps: float
    latent_norm_eps: float
    num_nextn_predict_layers: int = 0
    index_share_for_mtp_iteration: bool = False
    eos_token_ids: tuple[int, ...] = ()
    weight_dtype: FloatType = "bfloat16"
    fp8_weights: bool = False
    compute_dtype: FloatType = "bfloat16"
    activation_quantization: Literal["none", "fp8_1x128"] = "none"

    def __post_init__(self) -> None:
        for name in _SIZES:
            _check_size(name, getattr(self, name))
        for name in _NUMBERS:
            _number(name, getattr(self, name))
        for name in _FLAGS:
            _flag(name, getattr(self, name))
        _mtp_layers(self.num_nextn_predict_layers)
        if self.qk_rope_head_dim % 2:
            raise ValueError(f"qk_rope_head_dim must be even, got {self.qk_rope_head_dim}")
        if self.index_head_dim < self.qk_rope_head_dim:
            raise ValueError(
                f"index_head_dim {self.index_head_dim} is smaller than qk_rope_head_dim "
                f"{self.qk_rope_head_dim}, which the indexer rotates"
            )
        if self.num_experts_per_tok > self.n_routed_experts:
            raise ValueError(
                f"num_experts_per_tok {self.num_experts_per_tok} exceeds n_routed_experts "
                f"{self.n_routed_experts}"
            )
        for name in ("indexer_types", "mlp_layer_types", "eos_token_ids"):
            if not isinstance(getattr(self, name), tuple):
                raise ValueError(f"{name} must be a tuple, got {getattr(self, name)!r}")
        num_layers = self.num_hidden_layers
        _check_kinds("indexer_types", self.indexer_types, _INDEXER_TYPES, num_layers)
        _check_kinds("mlp_layer_types", self.mlp_layer_types, _MLP_LAYER_TYPES, num_layers)
        _check_layer_0("indexer_types", self.indexer_types)
        for token in self.eos_token_ids:
            if not _is_int(token) or not 0 <= token < self.vocab_size:
                raise ValueError(
                    f"eos_token_id {token!r} is not an id below vocab_size {self.vocab_size}"
                )
        for name in ("weight_dtype", "compute_dtype"):
            if getattr(self, name) not in FLOAT_TYPES:
                raise ValueError(
                    f"{name} must be one of {FLOAT_TYPES}, got {getattr(self, name)!r}"
                )
        if self.activation_quantization not in ("none", "fp8_1x128"):
            raise ValueError(
                "activation_quantization must be 'none' or 'fp8_1x128', got "
                f"{self.activation_quantization!r}"
            )

    @property
    def qk_head_dim(self) -> int:
        """Width of a query head: the part without position, then the rotated part."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def num_layers(self) -> int:
        """Decoder layers on disk: the trunk's, then the MTP layer."""
        return self.num_hidden_layers + self.num_nextn_predict_layers

    @property
    def num_index_layers(self) -> int:
        """Layers with an indexer of their own, the MTP layer included."""
        return self.indexer_types.count("full") + self.num_nextn_predict_layers

    @property
    def num_dense_layers(self) -> int:
        """Layers with a dense MLP."""
        return self.mlp_layer_types.count("dense")

    @property
    def num_sparse_layers(self) -> int:
        """Layers with experts, the MTP layer included."""
        return self.mlp_layer_types.count("sparse") + self.num_nextn_predict_layers

    def replace(self, **changes: Any) -> "GLMConfig":
        """A copy with fields changed, checked again."""
        return dataclasses.replace(self, **changes)

    @classmethod
    def from_pretrained(cls, path: str | Path) -> "GLMConfig":
        """Reads `config.json` of a checkpoint directory.

        Raises:
            FileNotFoundError: there is no config.json.
            ValueError: it is not JSON, or `from_hf` refuses it.
        """
        file = Path(path) / "config.json"
        if not file.is_file():
            raise FileNotFoundError(f"no config.json in {path}")
        try:
            fields = json.loads(file.read_text(encoding="utf-8"))
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{file} is not valid JSON: {error}") from error
        if not isinstance(fields, dict):
            raise ValueError(f"{file} must hold a JSON object")
        return cls.from_hf(fields)

    @classmethod
    def from_hf(cls, fields: Mapping[str, Any]) -> "GLMConfig":
        """Builds the configuration from the fields of a Hugging Face `config.json`.

        Keys without meaning for inference are ignored.

        Raises:
            ValueError: another model type, a setting that is not supported, a missing field, or
                fields that contradict each other; the message names the field.
        """
        _check_supported(fields)
        sizes = {name: _required(fields, name) for name in _SIZES}
        for name in _SIZES:
            _check_size(name, sizes[name])
        _check_derived_sizes(fields, sizes)
        weight_dtype = _agreed(fields, "dtype", "torch_dtype", default="bfloat16")
        if weight_dtype not in FLOAT_TYPES:
            raise ValueError(f"dtype must be one of {FLOAT_TYPES}, got {weight_dtype!r}")
        rms_norm_eps = _number("rms_norm_eps", _optional(fields, "rms_norm_eps", 1e-5))
        scaling = _required(fields, "routed_scaling_factor")
        shares = "index_share_for_mtp_iteration"
        num_layers = sizes["num_hidden_layers"]
        return cls(
            **sizes,
            indexer_types=_indexer_types(fields, num_layers),
            mlp_layer_types=_mlp_layer_types(fields, num_layers),
            routed_scaling_factor=_number("routed_scaling_factor", scaling),
            rope_theta=_rope_theta(fields),
            rms_norm_eps=rms_norm_eps,
            latent_norm_eps=rms_norm_eps,
            num_nextn_predict_layers=_mtp_layers(_optional(fields, "num_nextn_predict_layers", 0)),
            index_share_for_mtp_iteration=_flag(shares, _optional(fields, shares, False)),
            eos_token_ids=_token_ids(fields.get("eos_token_id")),
            weight_dtype=weight_dtype,
            fp8_weights=_fp8_weights(fields.get("quantization_config")),
            compute_dtype=weight_dtype,
        )


def _is_int(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _check_size(name: str, value: object) -> None:
    if not _is_int(value) or value < 1:
        raise ValueError(f"{name} must be a positive integer, got {value!r}")
    most = _MAX_LAYERS if name == "num_hidden_layers" else _INT32_MAX
    if value > most:
        raise ValueError(f"{name} must be at most {most}, got {value!r}")


def _number(name: str, value: Any) -> float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 < value <= _FLOAT32_MAX:
        raise ValueError(f"{name} must be a positive, finite number, got {value!r}")
    return float(value)


def _flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be true or false, got {value!r}")
    return value


def _mtp_layers(value: Any) -> int:
    if not _is_int(value) or value not in (0, 1):
        raise ValueError(f"num_nextn_predict_layers must be 0 or 1, got {value!r}")
    return value


def _optional(fields: Mapping[str, Any], name: str, default: Any) -> Any:
    return default if fields.get(name) is None else fields[name]


def _required(fields: Mapping[str, Any], name: str) -> Any:
    if fields.get(name) is None:
        raise ValueError(f"config.json lacks {name}")
    return fields[name]


def _agreed(fields: Mapping[str, Any], first: str, second: str, default: Any = None) -> Any:
    values = [fields[name] for name in (first, second) if fields.get(name) is not None]
    if len(values) == 2 and values[0] != values[1]:
        raise ValueError(f"{first} {values[0]!r} and {second} {values[1]!r} disagree")
    return values[0] if values else default


def _check_kinds(name: str, kinds: Any, known: Collection[str], num_layers: int) -> None:
    if not isinstance(kinds, list | tuple | str):
        raise ValueError(f"{name} must be a list of one entry a layer, got {kinds!r}")
    if len(kinds) != num_layers:
        raise ValueError(f"{name} has {len(kinds)} entries for num_hidden_layers {num_layers}")
    for layer, kind in enumerate(kinds):
        if not isinstance(kind, str) or kind not in known:
            raise ValueError(f"{name}[{layer}] must be one of {tuple(known)}, got {kind!r}")


def _check_layer_0(name: str, kinds: Sequence[str]) -> None:
    if kinds[0] != "full":
        raise ValueError(f"{name} must make layer 0 full: there is no selection to share")


def _check_supported(fields: Mapping[str, Any]) -> None:
    model_type = fields.get("model_type")
    if model_type == "glm5_next":
        raise ValueError(
            "model_type 'glm5_next' (GLM-5.3-Flash) is another architecture and is not supported; "
            f"this is an engine for '{MODEL_TYPE}' (GLM-5, 5.1, 5.2 and 5.3)"
        )
    if model_type != MODEL_TYPE:
        raise ValueError(f"model_type {model_type!r} is not supported; it must be '{MODEL_TYPE}'")
    for name, allowed in _SUPPORTED.items():
        value = fields.get(name)
        # 1 is no substitute for true.
        if value is not None and not any(type(value) is type(x) and value == x for x in allowed):
            only = f"only {allowed[0]!r}" if allowed else "no value"
            raise ValueError(f"{name} {value!r} is not supported, {only} is")


def _check_derived_sizes(fields: Mapping[str, Any], sizes: Mapping[str, int]) -> None:
    derived = {
        "qk_head_dim": (
            sizes["qk_nope_head_dim"] + sizes["qk_rope_head_dim"],
            "qk_nope_head_dim + qk_rope_head_dim",
        ),
        "num_key_value_heads": (sizes["num_attention_heads"], "num_attention_heads"),
    }
    for name, (value, meaning) in derived.items():
        given = fields.get(name)
        if given is not None and not (_is_int(given) and given == value):
            raise ValueError(f"{name} {given!r} must equal {meaning} = {value}")


def _indexer_types(fields: Mapping[str, Any], num_layers: int) -> tuple[str, ...]:
    """The schedule from whichever of the three forms are given; all given forms must agree.

    Layer i is full where max(i - offset + 1, 0) is a multiple of the frequency.
    """
    forms: dict[str, tuple[str, ...]] = {}
    types = fields.get("indexer_types")
    if types is not None:
        _check_kinds("indexer_types", types, _INDEXER_TYPES, num_layers)
        forms["indexer_types"] = tuple(types)
    pattern = fields.get("index_topk_pattern")
    if pattern is not None:
        kinds = {"F": "full", "S": "shared", "full": "full", "shared": "shared"}
        _check_kinds("index_topk_pattern", pattern, kinds, num_layers)
        forms["index_topk_pattern"] = tuple(kinds[kind] for kind in pattern)
    frequency = _optional(fields, "index_topk_freq", 1)
    offset = _optional(fields, "index_skip_topk_offset", 2)
    for name, value, least in (
        ("index_topk_freq", frequency, 1),
        ("index_skip_topk_offset", offset, 0),
    ):
        if not _is_int(value) or value < least:
            raise ValueError(f"{name} must be an integer of at least {least}, got {value!r}")
    if fields.get("index_topk_freq") is not None:
        forms["index_topk_freq / index_skip_topk_offset"] = tuple(
            "full" if max(layer - offset + 1, 0) % frequency == 0 else "shared"
            for layer in range(num_layers)
        )
    for name, schedule in forms.items():
        _check_layer_0(name, schedule)
    if not forms:
        return ("full",) * num_layers
    (first, schedule), *others = forms.items()
    for name, other in others:
        if other != schedule:
            raise ValueError(f"{first} and {name} disagree about which layers have an indexer")
    return schedule


def _mlp_layer_types(fields: Mapping[str, Any], num_layers: int) -> tuple[str, ...]:
    forms = []
    types = fields.get("mlp_layer_types")
    if types is not None:
        _check_kinds("mlp_layer_types", types, _MLP_LAYER_TYPES, num_layers)
        forms.append(tuple(types))
    dense = fields.get("first_k_dense_replace")
    if dense is not None:
        if not _is_int(dense) or dense < 0:
            raise ValueError(f"first_k_dense_replace must be an integer >= 0, got {dense!r}")
        dense = min(dense, num_layers)
        forms.append(("dense",) * dense + ("sparse",) * (num_layers - dense))
    if not forms:
        raise ValueError("config.json lacks mlp_layer_types and first_k_dense_replace")
    if forms[0] != forms[-1]:
        raise ValueError("mlp_layer_types and first_k_dense_replace disagree")
    return forms[0]


def _rope_theta(fields: Mapping[str, Any]) -> float:
    parameters = _optional(fields, "rope_parameters", {})
    if not isinstance(parameters, Mapping):
        raise ValueError(f"rope_parameters must be an object, got {parameters!r}")
    for name, only in (("rope_type", "default"), ("type", "default"), ("partial_rotary_factor", 1)):
        given = _optional(parameters, name, only)
        if isinstance(given, bool) or given != only:
            raise ValueError(f"rope_parameters.{name} {given!r} is not supported, only {only!r} is")
    both = {
        "rope_parameters.rope_theta": parameters.get("rope_theta"),
        "rope_theta": fields.get("rope_theta"),
    }
    theta = _agreed(both, "rope_parameters.rope_theta", "rope_theta")
    if theta is None:
        raise ValueError("config.json lacks rope_parameters.rope_theta")
    return _number("rope_theta", theta)


def _token_ids(value: Any) -> tuple[int, ...]:
    if value is None:
        return ()
    ids = tuple(value) if isinstance(value, list | tuple) else (value,)
    for token in ids:
        if not _is_int(token):
            raise ValueError(f"eos_token_id must hold integers, got {token!r}")
    return ids


def _fp8_weights(quantization: Any) -> bool:
    """Whether matrices are block-FP8. The list of exceptions in the file is not used: it misspells
    `indexer.weights_proj`, and which tensors are quantised is fixed by the architecture."""
    if quantization is None:
        return False
    if not isinstance(quantization, Mapping):
        raise ValueError(f"quantization_config must be an object, got {quantization!r}")
    for name, value in FP8_QUANTIZATION.items():
        given = _optional(quantization, name, value if name == "fmt" else None)
        if (list(given) if isinstance(given, tuple) else given) != value:
            raise ValueError(
                f"quantization_config.{name} {given!r} is not supported, only {value!r} is"
            )
    return True
