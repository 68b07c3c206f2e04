"""The offline entry point: a model, and prompts or conversations to continue."""

import contextlib
import itertools
import reprlib
import weakref
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

from tqdm import tqdm

from glm53.terminal import terminal_columns
from glm53.tokenizer import Tokenizer
from kvcache import CacheCounters
from serving.engine.metrics import LoopMetrics
from serving.engine.shared_engine import OnError, SharedEngine, dereference
from serving.options.engine_options import LLMOptions
from serving.options.other_names import ENGINE_NAMES, explain_unknown_names
from serving.options.unpack_options import unpack_options
from serving.requests.input_processor import (
    Params,
    Prompt,
    Prompts,
    list_prompts,
    prompt_text,
    spread_params,
)
from serving.requests.outputs import RequestOutput, failed_output
from serving.requests.request import Request
from serving.requests.sampling_params import SamplingParams

Conversation = Sequence[Mapping[str, Any]]


@explain_unknown_names(ENGINE_NAMES)
class LLM:
    """A loaded model with its KV store.

    Several threads may use it: their calls take turns step by step, and their prompts run together.
    A program that serves many callers is better off with a `ServingLoop`. As a context manager it
    closes itself. In a forked child every use but `close` raises a RuntimeError.

    Args:
        model: this and all others: see `EngineOptions`, and `LLMOptions` for `warm_up`.

    Attributes:
        config: the model's configuration.
        max_model_len: longest prompt and output together, in tokens.
        tokenizer: None if the model has none.

    Raises:
        FileNotFoundError: the model is not there.
        CheckpointError: its weights are damaged or of another model.
        TypeError: an unknown argument; the message says what it is called here, if it is known from
            elsewhere.
        ValueError: an argument is refused; the message names it.
    """

    @unpack_options(LLMOptions)
    def __init__(self, options: LLMOptions) -> None:
        self._shared = SharedEngine(options, warm_up=options.warm_up)
        self._engine = self._shared.engine
        self.config, self.max_model_len = self._engine.config, self._engine.max_model_len
        self.tokenizer = self._engine.tokenizer
        self._request_numbers = itertools.count()

    @property
    def cache_counters(self) -> CacheCounters:
        """Counters of the cache for all requests that are done."""
        return self._engine.runner.counters

    def metrics(self) -> LoopMetrics:
        """Metrics of the engine now: sequences, pages, preemptions and counts since the start."""
        return self._engine.metrics()

    def get_tokenizer(self) -> Tokenizer | None:
        """The model's tokenizer, None if it has none."""
        return self.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """Parameters of a request that gives none: the model's own, and else the defaults."""
        return SamplingParams().filled(self._engine.input_processor.generation_config.sampling)

    def close(self) -> None:
        """Ends all that runs and frees the memory of weights and KV store, on the devices and in
        host memory. It may be called again. `metrics`, `get_tokenizer` and
        `get_default_sampling_params` go on answering; all else then raises a RuntimeError.

        In the middle of a step of this thread, as from a signal handler, it does not wait: the
        step ends first. In a forked child it does nothing.
        """
        self._shared.close()

    def __enter__(self) -> "LLM":
        self._shared.check_usable()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def reset_prefix_cache(self) -> bool:
        """Drops the cached pages that no request uses, so that prompts are computed anew.

        Returns:
            Whether nothing is cached any more: an iterator that is not done keeps its pages.
        """
        return self._shared.run(self._engine.reset_prefix_cache)

    def generate(
        self,
        prompts: Prompts,
        sampling_params: Params = None,
        *,
        use_tqdm: bool = True,
        on_error: OnError = "raise",
    ) -> list[RequestOutput]:
        """Continues prompts.

        Args:
            prompts: one prompt, or an iterable of prompts, which is drawn to its end first. A
                prompt is text, a list or array of token ids, `{"prompt": text}`,
                `{"prompt_token_ids": [ids]}`, or a conversation: `{"messages": [...]}` with the
                further arguments of `chat`.
            sampling_params: one for all prompts, or one each; None is the defaults.
            use_tqdm: show progress if standard error is a terminal; elsewhere nothing is shown.
            on_error: "raise" refuses the whole call for a bad prompt, and raises what goes wrong
                later; "return" gives what was refused or failed an output with `error`, and serves
                the others.

        Returns:
            One output a prompt, in the order given.

        Raises:
            ValueError, TypeError: a prompt or parameter is refused. Nothing has been computed then.
        """
        requests = self._read_all("prompts", list_prompts(prompts), sampling_params, on_error)
        return self._finish(requests, use_tqdm, on_error)

    def generate_iter(
        self,
        prompts: Prompts,
        sampling_params: Params = None,
        *,
        stream: bool = False,
        on_error: OnError = "raise",
    ) -> Iterator[tuple[int, RequestOutput]]:
        """Continues prompts and yields outputs as they are done.

        Args:
            prompts: as for `generate`.
            sampling_params: as for `generate`.
            stream: also yield each output as far as it has come, `finished` false, whenever it
                has grown.
            on_error: as for `generate`.

        Yields:
            A prompt's place among `prompts`, from 0, and its output; in order of completion. What
            is left is aborted when the iterator is closed. The iterator does not keep the LLM: if
            that is closed, or nothing refers to it, the next output is a RuntimeError.

        Raises:
            ValueError, TypeError: a prompt or parameter is refused. Nothing has been computed then.
        """
        requests = self._read_all("prompts", list_prompts(prompts), sampling_params, on_error)
        return self._shared.outputs(requests, stream, on_error)

    def chat(
        self,
        messages: Conversation | Iterable[Conversation],
        sampling_params: Params = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        use_tqdm: bool = True,
        on_error: OnError = "raise",
    ) -> list[RequestOutput]:
        """Continues conversations with the assistant's next turn.

        Args:
            messages: one conversation, or an iterable of them; see `glm53.chat.read_messages`.
            sampling_params: as for `generate`.
            tools: tools that the assistant may call.
            add_generation_prompt: open the assistant's next turn.
            continue_final_message: go on with the last message instead; needs
                `add_generation_prompt=False`.
            chat_template_kwargs: further options of `glm53.chat.render`, such as
                `reasoning_effort`, or `model` for an earlier model's format.
            use_tqdm: as for `generate`.
            on_error: as for `generate`.

        Returns:
            One output a conversation; `glm53.chat.parse`, given the same `tools`, splits its text.

        Raises:
            ValueError, TypeError: a message or parameter is refused. Nothing has been computed
                then.
        """
        if not isinstance(messages, Iterable) or isinstance(messages, str | Mapping):
            kind = type(messages).__name__
            raise TypeError(f"messages must be a conversation or several, got {kind}")
        listed = list(messages)
        one = bool(listed) and isinstance(listed[0], Mapping)
        prompts: list[Prompt] = [
            {
                "messages": conversation,
                "tools": tools,
                "add_generation_prompt": add_generation_prompt,
                "continue_final_message": continue_final_message,
                "chat_template_kwargs": chat_template_kwargs,
            }
            for conversation in ([listed] if one else listed)
        ]
        requests = self._read_all("conversations", prompts, sampling_params, on_error)
        return self._finish(requests, use_tqdm, on_error)

    def serve(
        self, requests: Iterable[tuple[Prompt, SamplingParams]], *, stream: bool = False
    ) -> Generator[tuple[int, RequestOutput]]:
        """Continues prompts that are drawn as they are needed.

        At most `max_num_seqs` wait beside those that run, however many there are.

        Args:
            requests: pairs of a prompt and its parameters.
            stream: as for `generate_iter`.

        Yields:
            A prompt's place among `requests`, from 0, and its output, in order of completion; one
            that is refused, or does not fit, has `error`.

        Raises:
            TypeError: one of `requests` is no pair.
            Exception: whatever a step raised.
        """
        self._shared.check_usable()
        llm: weakref.ref[LLM] = weakref.ref(self)
        read = (
            dereference(llm)._read(where, *_read_pair(where, pair), "return")
            for where, pair in ((f"requests[{place}]", pair) for place, pair in enumerate(requests))
        )
        return self._shared.outputs(read, stream, None)

    def export_prefix(self, prompt: Prompt, path: str | Path) -> int:
        """Writes the cached rows of a prompt to a file, computing those that are not cached.

        Args:
            prompt: text, a list of token ids, `{"prompt": text}` or `{"prompt_token_ids": [ids]}`.
            path: the file, replaced if it exists.

        Returns:
            Tokens of the prompt.

        Raises:
            ValueError, TypeError: the prompt is refused, also one that leaves no room for a token
                within `max_model_len`; or `enable_prefix_caching` is off.
            OSError: the file cannot be written. Nothing is left of it then.
        """
        self._check_prefix_caching("export_prefix")
        params = SamplingParams(temperature=0, max_tokens=1)
        request = self._read("prompt", prompt, params, "raise")
        assert isinstance(request, Request)
        self._shared.export_prefix(request, Path(path))
        return len(request.sequences[0].token_ids)

    def import_prefix(self, path: str | Path) -> int:
        """Puts a file's rows into the cache; prompts that begin with its tokens continue from them.

        Args:
            path: a file that `export_prefix` wrote, with the same model and kv_cache_dtype; page
                size and number of devices may differ.

        Returns:
            Tokens of the prefix.

        Nothing of a file that is refused is cached. Other prefixes may have been evicted to make
        room for it if it is damaged inside its rows, or its pages find no place.

        Raises:
            ValueError: `enable_prefix_caching` is off.
            PrefixFileError: the file is no prefix file, torn, damaged, or of another model or
                format.
            OutOfPagesError: the cache has too little room.
            OSError: the file cannot be read.
        """
        self._check_prefix_caching("import_prefix")
        return self._shared.run(partial(self._engine.import_prefix, Path(path)))

    def _check_prefix_caching(self, what: str) -> None:
        self._shared.check_usable()
        if not self._engine.input_processor.enable_prefix_caching:
            raise ValueError(f"{what} needs enable_prefix_caching=True")

    def _read_all(
        self, what: str, prompts: Sequence[Prompt], params: Params, on_error: OnError
    ) -> list[Request | RequestOutput]:
        """Requests, before the first step: a bad one must not stop the others half way."""
        self._shared.check_usable()
        if on_error not in ("raise", "return"):
            raise ValueError(f"on_error must be 'raise' or 'return', got {on_error!r}")
        spread = spread_params(params, len(prompts))
        return [
            self._read(f"{what}[{place}]", prompt, param, on_error)
            for place, (prompt, param) in enumerate(zip(prompts, spread, strict=True))
        ]

    def _read(
        self, where: str, prompt: Prompt, params: SamplingParams, on_error: OnError
    ) -> Request | RequestOutput:
        request_id = str(next(self._request_numbers))
        try:
            return self._engine.input_processor.read(request_id, prompt, params)
        except (ValueError, TypeError) as error:
            if on_error == "raise":
                # Not the error's own type, which may need other arguments.
                kind = TypeError if isinstance(error, TypeError) else ValueError
                raise kind(f"{where}: {error}") from error
            return failed_output(request_id, str(error), prompt_text(prompt))

    def _finish(
        self, requests: Sequence[Request | RequestOutput], use_tqdm: bool, on_error: OnError
    ) -> list[RequestOutput]:
        """Runs requests to the end, with a progress bar, and gives outputs in their order."""
        found: dict[int, RequestOutput] = {}
        hidden = not (use_tqdm and terminal_columns())
        running = contextlib.closing(self._shared.outputs(requests, False, on_error))
        progress = tqdm(total=len(requests), desc="Processed prompts", disable=hidden)
        num_read = num_written = 0
        with running as outputs, progress:
            for place, output in outputs:
                found[place] = output
                num_read += len(output.prompt_token_ids)
                num_written += sum(len(part.token_ids) for part in output.outputs)
                seconds = max(progress.format_dict["elapsed"], 1e-9)
                progress.set_postfix_str(
                    f"est. speed input: {num_read / seconds:.2f} toks/s, "
                    f"output: {num_written / seconds:.2f} toks/s",
                    refresh=False,
                )
                progress.update()
        return [found[place] for place in range(len(requests))]


def _read_pair(where: str, pair: object) -> tuple[Any, Any]:
    """A prompt and its parameters; a TypeError for anything else."""
    if isinstance(pair, tuple | list) and len(pair) == 2:
        return pair[0], pair[1]
    raise TypeError(f"{where} must be a pair (prompt, SamplingParams), got {reprlib.repr(pair)}")
