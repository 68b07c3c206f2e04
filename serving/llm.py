"""The offline entry point: a model, and a list of prompts to continue."""

import contextlib
import dataclasses
import importlib.resources
import itertools
import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from jax.sharding import Mesh
from tqdm import tqdm

from glm53.checkpoint.source import load_checkpoint, read_config
from glm53.config import GLMConfig
from glm53.kv_geometry import kv_geometry
from glm53.model import abstract_model
from glm53.sharding import make_mesh
from glm53.tokenizer import Tokenizer
from kvcache.geometry import KVGeometry
from pallas_kernels.row_format import ROW_KINDS, RowKind
from serving.buckets import Buckets
from serving.generation_loop import GenerationLoop, Request
from serving.model_runner import ModelRunner
from serving.outputs import CompletionOutput, RequestOutput, TokenLogprobs
from serving.sampling_params import SamplingParams

logger = logging.getLogger(__name__)

BUILT_IN_MODEL = "tiny"
Prompt = str | Mapping[str, Any]

_DTYPES = ("auto", "float32", "bfloat16")
_CPU_CACHE_BYTES = 1 << 30
_DEVICE_MEMORY_SHARE = 0.92


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


class LLM:
    """A loaded model with its KV store, for one call at a time.

    Args:
        model: "tiny", which is built in, or a checkpoint directory.
        dtype: "float32" or "bfloat16" for activations and unquantised weights. "auto" is the
            checkpoint's dtype, and float32 on a CPU, where bfloat16 is slower.
        kv_cache_dtype: "float32", "bfloat16" or "fp8" for cached rows; "auto" is `dtype`.
        max_model_len: longest prompt and output together, in tokens; None is the model's limit.
        latent_norm_eps: epsilon of the latent norms; None is the config's `rms_norm_eps`. Hugging
            Face transformers computes with 1e-6.
        activation_quantization: "none" or "fp8_1x128"; "auto" is fp8 for FP8 weights on a GPU.
        tensor_parallel_size: devices to shard the model and the store over.
        max_num_seqs: most sequences that decode together.
        max_num_batched_tokens: most prompt tokens of one step.
        device_pages: pages of the store. None takes what fits: 92% of the memory that JAX may use
            of each accelerator, less the weights; 1 GiB a device on a CPU.

    Raises:
        FileNotFoundError: the model is not there.
        CheckpointError: its weights are damaged or of another model.
        ValueError: an argument is refused; the message names it.
    """

    def __init__(
        self,
        model: str | Path = BUILT_IN_MODEL,
        *,
        dtype: Literal["auto", "float32", "bfloat16"] = "auto",
        kv_cache_dtype: Literal["auto", "float32", "bfloat16", "fp8"] = "auto",
        max_model_len: int | None = None,
        latent_norm_eps: float | None = None,
        activation_quantization: Literal["auto", "none", "fp8_1x128"] = "auto",
        tensor_parallel_size: int = 1,
        max_num_seqs: int = 256,
        max_num_batched_tokens: int = 512,
        device_pages: int | None = None,
    ) -> None:
        _check_count("tensor_parallel_size", tensor_parallel_size)
        _check_count("max_num_seqs", max_num_seqs)
        _check_count("max_num_batched_tokens", max_num_batched_tokens)
        for name, value in (("max_model_len", max_model_len), ("device_pages", device_pages)):
            if value is not None:
                _check_count(name, value)
        path = model_path(model)
        mesh = make_mesh(tensor_parallel_size)
        on_cpu = mesh.devices.flat[0].platform == "cpu"
        config = read_config(path)
        self.config = _resolve_numerics(
            config, dtype, latent_norm_eps, activation_quantization, on_cpu
        )
        self.max_model_len = _resolve_max_model_len(config, max_model_len)
        # Whatever can be refused is, before the weights are read.
        one_page = kv_geometry(
            self.config,
            row_kind=_resolve_row_kind(kv_cache_dtype, self.config.compute_dtype),
            device_pages=1,
            max_model_len=self.max_model_len,
            max_sequences=max_num_seqs,
            num_devices=mesh.size,
        )
        has_tokenizer = (path / "tokenizer.json").is_file()
        self.tokenizer = Tokenizer.from_dir(path) if has_tokenizer else None
        graph, _ = abstract_model(self.config)
        params = load_checkpoint(path, self.config, mesh, use_tqdm=True)
        geometry = _resolve_geometry(one_page, device_pages, mesh)
        buckets = Buckets.for_geometry(geometry, max_num_batched_tokens)
        self._runner = ModelRunner(self.config, graph, params, geometry, mesh, buckets)
        self._loop = GenerationLoop(self._runner)
        self._request_numbers = itertools.count()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Continues prompts.

        Args:
            prompts: one prompt or several: text, `{"prompt": text}` or
                `{"prompt_token_ids": [ids]}`.
            sampling_params: one for all prompts, or one each; None is the defaults.
            use_tqdm: show progress, if standard error is a terminal.

        Returns:
            One output a prompt, in the order given.

        Raises:
            ValueError, TypeError: a prompt or parameter is refused. Nothing has been computed then.
        """
        if isinstance(prompts, str | Mapping):
            prompts = [prompts]
        if not isinstance(prompts, Sequence):
            raise TypeError(f"prompts must be a prompt or a list, got {type(prompts).__name__}")
        params = _spread_params(sampling_params, len(prompts))
        jobs = [
            self._prepare(number, prompt, param)
            for number, (prompt, param) in enumerate(zip(prompts, params, strict=True))
        ]
        hidden = not (use_tqdm and sys.stderr.isatty())
        # Closed here, so that an interruption cannot leave pages in use.
        finished = contextlib.closing(self._loop.run([job.request for job in jobs]))
        progress = tqdm(total=len(jobs), desc="Processed prompts", disable=hidden)
        with finished as requests, progress:
            for _ in requests:
                progress.update()
        return [self._output(job) for job in jobs]

    def _prepare(self, number: int, prompt: Prompt, params: SamplingParams) -> "_Job":
        where = f"prompts[{number}]"
        text, token_ids = self._token_ids(where, prompt)
        if not len(token_ids):
            raise ValueError(f"{where} is empty: it needs at least one token")
        last_id = self.config.vocab_size - 1
        for token in token_ids:
            is_id = isinstance(token, int | np.integer) and not isinstance(token, bool)
            if not is_id or not 0 <= token <= last_id:
                raise ValueError(f"{where} holds token id {token!r}, which is not in 0..{last_id}")
        room = self.max_model_len - len(token_ids)
        if room < 1:
            raise ValueError(
                f"{where} has {len(token_ids)} tokens, which leaves no room for output within "
                f"max_model_len {self.max_model_len}"
            )
        eos = () if params.ignore_eos else self.config.eos_token_ids
        job = _Job(
            text,
            Request(
                [int(token) for token in token_ids],
                params,
                room if params.max_tokens is None else min(params.max_tokens, room),
                frozenset(eos) | frozenset(params.stop_token_ids or ()),
            ),
        )
        needed = self._runner.geometry.pages_for(job.request.most_cached_tokens)
        if needed > self._runner.geometry.device_pages:
            raise ValueError(
                f"{where} needs {needed} pages for its prompt and max_tokens {params.max_tokens}, "
                f"device_pages is {self._runner.geometry.device_pages}"
            )
        if params.prompt_logprobs is not None:
            job.request.on_logits = self._logprob_collector(job, params.prompt_logprobs)
        return job

    def _token_ids(self, where: str, prompt: Prompt) -> tuple[str | None, Sequence[int]]:
        if isinstance(prompt, str):
            prompt = {"prompt": prompt}
        if not isinstance(prompt, Mapping):
            raise TypeError(f"{where} must be text or a dict, got {type(prompt).__name__}")
        unknown = set(prompt) - {"prompt", "prompt_token_ids"}
        if unknown:
            raise ValueError(f"{where} has unknown field {min(unknown, key=str)!r}")
        text, token_ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
        if token_ids is not None:
            is_array = isinstance(token_ids, np.ndarray) and token_ids.ndim == 1
            if not is_array and not isinstance(token_ids, list | tuple):
                raise TypeError(f"{where}: prompt_token_ids must be a list of ids")
            if text is not None and not isinstance(text, str):
                raise TypeError(f"{where}: prompt must be text, got {type(text).__name__}")
            return text, list(token_ids)
        if not isinstance(text, str):
            raise ValueError(f"{where} needs 'prompt' text or 'prompt_token_ids'")
        if self.tokenizer is None:
            raise ValueError(
                f"{where} is text, but the model has no tokenizer.json: pass prompt_token_ids"
            )
        try:
            return text, self.tokenizer.encode(text)
        except UnicodeEncodeError as error:
            raise ValueError(f"{where} is not valid Unicode: {error}") from error

    def _logprob_collector(self, job: "_Job", count: int) -> Callable[[np.ndarray], None]:
        """A sink for the logits of a prompt's chunks; row i tells of token i + 1."""
        decode = self._decode_token if self.tokenizer is not None else None
        job.prompt_logprobs = [None]
        found = job.prompt_logprobs

        def collect(logits: np.ndarray) -> None:
            for row in logits:
                if len(found) < len(job.request.token_ids):
                    token = job.request.token_ids[len(found)]
                    found.append(TokenLogprobs(row, token, count, decode))

        return collect

    def _decode_token(self, token: int) -> str:
        assert self.tokenizer is not None
        return self.tokenizer.decode([token], skip_special_tokens=False)

    def _output(self, job: "_Job") -> RequestOutput:
        request = job.request
        ids, reason = request.output_ids, request.finish_reason
        assert reason is not None
        stopped = reason == "stop"
        stopped_by = (
            ids[-1] if stopped and ids[-1] in (request.params.stop_token_ids or ()) else None
        )
        shown = ids[:-1] if stopped else ids
        text = self.tokenizer.decode(shown) if self.tokenizer is not None else ""
        return RequestOutput(
            request_id=str(next(self._request_numbers)),
            prompt=job.text,
            prompt_token_ids=list(request.token_ids),
            prompt_logprobs=job.prompt_logprobs,
            outputs=[CompletionOutput(0, text, ids, reason, stopped_by)],
            finished=True,
        )


class _Job:
    """A request on its way through the loop, with what the loop need not know."""

    def __init__(self, text: str | None, request: Request) -> None:
        self.text, self.request = text, request
        self.prompt_logprobs: list[TokenLogprobs | None] | None = None


def _check_count(name: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name} must be a positive integer, got {value!r}")


def _spread_params(
    params: SamplingParams | Sequence[SamplingParams] | None, count: int
) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if len(params) != count:
        raise ValueError(f"{len(params)} sampling_params for {count} prompts")
    for number, param in enumerate(params):
        if not isinstance(param, SamplingParams):
            raise TypeError(f"sampling_params[{number}] is a {type(param).__name__}")
    return list(params)


def _resolve_numerics(
    config: GLMConfig,
    dtype: str,
    latent_norm_eps: float | None,
    activation_quantization: str,
    on_cpu: bool,
) -> GLMConfig:
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


def _resolve_max_model_len(config: GLMConfig, max_model_len: int | None) -> int:
    limit = config.max_position_embeddings
    if max_model_len is not None and max_model_len > limit:
        raise ValueError(
            f"max_model_len {max_model_len} exceeds the model's max_position_embeddings {limit}"
        )
    return max_model_len or limit


def _resolve_row_kind(kv_cache_dtype: str, compute_dtype: str) -> RowKind:
    kind = compute_dtype if kv_cache_dtype == "auto" else kv_cache_dtype
    for known in ROW_KINDS:
        if kind == known:
            return known
    raise ValueError(f"kv_cache_dtype must be 'auto' or one of {ROW_KINDS}, got {kv_cache_dtype!r}")


def _resolve_geometry(one_page: KVGeometry, device_pages: int | None, mesh: Mesh) -> KVGeometry:
    """The store's sizes; `device_pages` None is as many as memory and all sequences can use."""
    page_bytes = one_page.page_bytes + one_page.index_page_bytes
    if device_pages is None:
        needed = one_page.max_pages_per_sequence
        fitting = sum(_free_bytes(device) for device in mesh.devices.flat) // page_bytes
        device_pages = min(fitting, one_page.max_sequences * needed)
        if device_pages < needed:
            raise ValueError(
                f"memory for {device_pages} pages is less than the {needed} that max_model_len "
                "needs: lower max_model_len"
            )
    logger.info(
        "KV store: %d pages of %d tokens, %.2f GiB",
        device_pages,
        one_page.rows_per_page,
        device_pages * page_bytes / 2**30,
    )
    return dataclasses.replace(one_page, num_pages=device_pages, device_pages=device_pages)


def _free_bytes(device: Any) -> int:
    if device.platform == "cpu":
        return _CPU_CACHE_BYTES
    stats = device.memory_stats() or {}
    if "bytes_limit" not in stats:
        raise ValueError(f"{device} does not tell its memory: set device_pages")
    return int(stats["bytes_limit"] * _DEVICE_MEMORY_SHARE) - stats["bytes_in_use"]
