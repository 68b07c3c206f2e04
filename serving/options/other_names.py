"""Names that options have in vLLM, SGLang and transformers, and what they are called here."""

import difflib
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

Class = TypeVar("Class")

_LEAST_SIMILARITY = 0.8  # below it come names that share a word and mean something else


def _each(hint: str, *names: str) -> dict[str, str]:
    return dict.fromkeys(names, hint)


def _called(ours: str, *names: str) -> dict[str, str]:
    return _each(f"it is called {ours} here", *names)


ENGINE_NAMES: Mapping[str, str] = {
    **_called("model", "model_path", "pretrained_model_name_or_path"),
    **_called("dtype", "torch_dtype"),
    **_called("max_model_len", "context_length", "max_length", "max_seq_len"),
    **_called("tensor_parallel_size", "num_gpus", "tp", "tp_size"),
    **_called("max_num_seqs", "max_batch_size", "max_running_requests"),
    **_called("max_num_batched_tokens", "chunked_prefill_size", "max_prefill_tokens"),
    **_called("memory_fraction", "gpu_memory_utilization", "mem_fraction_static"),
    **_called("host_memory_gib", "hicache_size", "kv_offloading_size", "swap_space"),
    **_each(
        "weights stay on the devices; host_memory_gib is for cached pages",
        "cpu_offload_gb",
        "offload_folder",
    ),
    **_each(
        "kv_policy and host_memory_gib set what goes to host memory",
        "enable_hierarchical_cache",
        "hicache_ratio",
        "hicache_write_policy",
        "kv_offloading_backend",
        "kv_transfer_config",
    ),
    **_each(
        "device_pages sets the size of the store, in pages",
        "kv_cache_memory_bytes",
        "max_total_tokens",
        "num_gpu_blocks_override",
    ),
    **_each("enable_prefix_caching=False does it here", "disable_radix_cache"),
    **_each("the level is that of Python's logging", "log_level"),
    **_each("metrics() gives the counts", "disable_log_stats", "enable_metrics"),
    **_each("prompts are always computed in chunks", "enable_chunked_prefill"),
    **_each("the kernels fix the size of a page", "block_size", "page_size"),
    **_each(
        "the tokenizer is that of the model's directory",
        "skip_tokenizer_init",
        "tokenizer",
        "tokenizer_mode",
        "tokenizer_path",
        "tokenizer_revision",
    ),
    **_each("the checkpoint says how it is quantised", "quantization", "quantization_config"),
    **_each("the files of the model's directory show their format", "load_format"),
    **_each("no code of a checkpoint is run", "trust_remote_code"),
    **_each(
        "model is a directory, and nothing is downloaded",
        "download_dir",
        "hf_token",
        "revision",
        "token",
    ),
    **_each(
        "config.json of the model's directory is what counts",
        "config",
        "hf_overrides",
        "rope_scaling",
        "rope_theta",
    ),
    **_each(
        "generation_config.json of the model's directory is what counts",
        "generation_config",
        "override_generation_config",
    ),
    **_each(
        "every step is compiled, when it is first used or at once with warm_up",
        "compilation_config",
        "cuda_graph_max_bs",
        "disable_cuda_graph",
        "enforce_eager",
        "max_seq_len_to_capture",
    ),
    **_each("the kernels follow from the devices", "attention_backend", "attn_implementation"),
    **_each("JAX_PLATFORMS in the environment chooses the devices", "device"),
    **_each(
        "one process drives all devices: see tensor_parallel_size",
        "data_parallel_size",
        "device_map",
        "distributed_executor_backend",
        "dp_size",
        "enable_expert_parallel",
        "ep_size",
        "pipeline_parallel_size",
        "pp_size",
    ),
    **_each("there is no HTTP server, so the model needs no name", "served_model_name"),
    **_each(
        "glm53.chat.parse and StreamingParser split reasoning and tool calls off a text",
        "enable_auto_tool_choice",
        "reasoning_parser",
        "tool_call_parser",
    ),
    **_each("the model reads text alone", "limit_mm_per_prompt", "mm_processor_kwargs"),
    **_each("there is no speculative decoding", "num_speculative_tokens", "speculative_config"),
    **_each("there are no adapters", "enable_lora", "lora_paths", "max_loras"),
    **_each("the chat format is GLM's: see chat_template_kwargs of chat", "chat_template"),
    **_each(
        "it is of a request: pass it to SamplingParams",
        "bad_words",
        "frequency_penalty",
        "logprobs",
        "max_tokens",
        "min_p",
        "min_tokens",
        "n",
        "presence_penalty",
        "random_seed",
        "repetition_penalty",
        "seed",
        "stop",
        "temperature",
        "top_k",
        "top_p",
    ),
    **_each("pass it to LLM or ServingLoop", "warm_up"),
}
"""Of options of the engine: name elsewhere, and what to do here."""

SAMPLING_NAMES: Mapping[str, str] = {
    **_called("max_tokens", "max_completion_tokens", "max_new_tokens"),
    **_called("min_tokens", "min_new_tokens"),
    **_each("max_tokens limits the output alone, without the prompt", "max_length"),
    **_each("min_tokens counts the output alone, without the prompt", "min_length"),
    **_called("n", "num_return_sequences"),
    **_called("seed", "random_seed", "sampling_seed"),
    **_called("stop", "stop_sequences", "stop_strings"),
    **_called("stop_token_ids", "eos_token_id"),
    **_called("include_stop_str_in_output", "no_stop_trim"),
    **_each("bad_words takes texts, not ids", "bad_words_ids"),
    **_called("logit_bias", "sequence_bias"),
    **_called("logprobs", "return_logprob", "top_logprobs", "top_logprobs_num"),
    **_each("temperature=0 is greedy, any other samples", "do_sample", "greedy"),
    **_each("logit_bias of -100 keeps a token out", "suppress_tokens"),
    **_each("ask for n, and choose by cumulative_logprob", "best_of"),
    **_each(
        "there is no beam search",
        "beam_width",
        "early_stopping",
        "length_penalty",
        "num_beams",
        "use_beam_search",
    ),
    **_each(
        "output is not held to a grammar",
        "ebnf",
        "guided_choice",
        "guided_decoding",
        "guided_grammar",
        "guided_json",
        "guided_regex",
        "json_schema",
        "regex",
        "response_format",
        "structural_tag",
        "structured_outputs",
    ),
    **_each("stop takes texts, not patterns", "stop_regex"),
    **_each(
        "user code cannot run between tokens: see logit_bias",
        "custom_logit_processor",
        "custom_params",
        "extra_args",
        "logits_processors",
        "stopping_criteria",
    ),
    **_each("there is no typical sampling: see top_p and min_p", "typical_p"),
    **_each("see logprobs", "top_n_tokens"),
    **_each("nothing is padded", "pad_token_id"),
    **_each("repetition ends no output: see repetition_penalty", "repetition_detection"),
    **_each("see frequency_penalty and bad_words", "no_repeat_ngram_size"),
    **_each("a prompt is never cut: pass fewer tokens", "truncate_prompt_tokens"),
    **_each("text is what the tokens' bytes are", "spaces_between_special_tokens"),
    **_each("generate_iter streams", "output_kind", "stream"),
    **_each("see enable_prefix_caching of LLM", "skip_reading_prefix_cache"),
    **_each("reasoning_effort of chat_template_kwargs limits it", "thinking_token_budget"),
}
"""Of sampling parameters: name elsewhere, and what to do here."""

FORMAT_NAMES: Mapping[str, str] = {
    **_called("'float32'", "f32", "float", "fp32", "single"),
    **_called("'bfloat16'", "bf16"),
    **_called("'fp8'", "float8_e4m3fn", "fp8_e4m3", "fp8_e4m3fn"),
    **_each("the range of float16 is too small, use 'bfloat16'", "float16", "fp16", "half"),
}
"""Of formats of numbers: name elsewhere, and what to do here."""


def explain_unknown_names(other_names: Mapping[str, str]) -> Callable[[type[Class]], type[Class]]:
    """Decorator of a class that refuses unknown keyword arguments with what to do instead.

    Args:
        other_names: names elsewhere, and what to do here.
    """

    def decorate(kind: type[Class]) -> type[Class]:
        init = kind.__init__
        known = list(inspect.signature(init).parameters)[1:]

        @functools.wraps(init)
        def explaining(self: Class, *args: Any, **fields: Any) -> None:
            for name in fields:
                if name not in known:
                    hint = _hint(name, known, other_names)
                    raise TypeError(f"{kind.__name__} takes no {name!r}{hint}")
            init(self, *args, **fields)

        kind.__init__ = explaining
        return kind

    return decorate


def _hint(name: str, known: Sequence[str], other_names: Mapping[str, str]) -> str:
    if name in other_names:
        return f": {other_names[name]}"
    close = difflib.get_close_matches(name, known, 1, _LEAST_SIMILARITY)
    return f": did you mean {close[0]!r}?" if close else ""
