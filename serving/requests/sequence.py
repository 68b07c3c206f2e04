"""A sequence of a request, from prompt to output."""

import dataclasses
from collections import abc
from typing import override

import numpy as np

from kvcache import CacheCounters
from kvcache.reads import no_reads
from serving.requests.output_text import OutputText
from serving.requests.outputs import CompletionOutput, FinishReason, TokenLogprobs
from serving.requests.sampling_params import SamplingParams
from serving.sampling.state import SlotSampling
from serving.scheduler.sequence import Sequence


@dataclasses.dataclass(eq=False, kw_only=True)
class RequestSequence(Sequence):
    """A sequence of a request: a prompt, how to continue it, and what has been generated for it.

    Attributes:
        params: how to continue, nothing left out.
        stop_ids: ids that end the output.
        sampling: what the sampler needs to know, None for plain greedy decoding.
        text: its text, or None without a tokenizer or `detokenize`.
        prompt_logprobs: what the prompt's tokens had; filled while the prompt is computed.
        logprobs: of each generated token, if asked for.
        finish_reason: set when it is done.
        stop_reason: the stop id or text that ended it; None for an end-of-sequence id.
        reads: what the launches whose results are known have read for it.
        cache_counters: what the cache did for it; filled when it is done.
        last_token_at: when its last token became known, by `time.monotonic`.
    """

    params: SamplingParams
    stop_ids: frozenset[int]
    sampling: SlotSampling | None
    text: OutputText | None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    logprobs: list[TokenLogprobs] = dataclasses.field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    reads: np.ndarray = dataclasses.field(default_factory=no_reads)
    cache_counters: CacheCounters = dataclasses.field(default_factory=CacheCounters)
    last_token_at: float | None = None

    @property
    @override
    def finished(self) -> bool:
        """Whether it wants no more tokens."""
        return self.finish_reason is not None

    @property
    def scores_prompt(self) -> bool:
        """Whether log-probabilities of the prompt are still to be computed."""
        known = len(self.prompt_logprobs or ())
        return self.params.prompt_logprobs is not None and known < len(self.token_ids)

    @property
    @override
    def reuse_prefix(self) -> bool:
        """Whether cached rows may stand for computed ones."""
        return self.cacheable and not self.scores_prompt

    def accept_prompt_logprobs(self, start: int, logprobs: abc.Sequence[TokenLogprobs]) -> None:
        """Takes what the prompt's tokens after the one at `start` had, one chunk after another; a
        start of 0 begins anew."""
        if self.prompt_logprobs is None or start == 0:
            self.prompt_logprobs = [None]
        assert len(self.prompt_logprobs) == start + 1, "a chunk is missing"
        self.prompt_logprobs += logprobs

    def accept(self, token: int, logprobs: TokenLogprobs | None) -> None:
        """Takes the next token and decides whether it is the last."""
        self.output_ids.append(token)
        if logprobs is not None:
            self.logprobs.append(logprobs)
        may_stop = len(self.output_ids) > self.params.min_tokens
        if token in self.stop_ids and may_stop:
            self.finish_reason = "stop"
            listed = token in (self.params.stop_token_ids or ())
            self.stop_reason = token if listed else None
            if self.text is not None and self.params.include_stop_str_in_output:
                self.text.push(token, may_stop=False)
        elif self.text is not None:
            self.text.push(token, may_stop=may_stop)
            if self.text.stopped_by is not None:
                self.finish_reason, self.stop_reason = "stop", self.text.stopped_by
        if self.finish_reason is None and len(self.output_ids) == self.max_tokens:
            self.finish_reason = "length"
        if self.finish_reason is not None and self.text is not None:
            self.text.finish()

    def output(self, index: int) -> CompletionOutput:
        """Output so far."""
        wanted = self.params.logprobs is not None
        if self.params.max_tokens == 0:
            return CompletionOutput(
                index=index,
                text="",
                token_ids=[],
                cumulative_logprob=0.0 if wanted else None,
                logprobs=[] if wanted else None,
                finish_reason="length" if self.finish_reason == "stop" else self.finish_reason,
                stop_reason=None,
            )
        return CompletionOutput(
            index=index,
            text=self.text.text if self.text is not None else "",
            token_ids=list(self.output_ids),
            cumulative_logprob=sum(entry.token_logprob for entry in self.logprobs)
            if wanted
            else None,
            logprobs=list(self.logprobs) if wanted else None,
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
        )
