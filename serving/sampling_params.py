"""How a request is to be continued, with vLLM's names and meanings."""

import dataclasses
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Decoding is greedy: the most likely token, the lowest id among equals.

    Attributes:
        temperature: 0, greedy.
        max_tokens: most tokens to generate; None is up to the model's length limit.
        stop_token_ids: further ids that end the output, besides the model's end-of-sequence ids.
        ignore_eos: go on past end-of-sequence ids.
        prompt_logprobs: log-probabilities to return for each prompt token: that many best and the
            token itself; -1 is the whole vocabulary, None is none.

    Raises:
        TypeError: an unknown field.
        ValueError: a field is out of range.
    """

    temperature: float = 0.0
    max_tokens: int | None = 16
    stop_token_ids: Sequence[int] | None = ()
    ignore_eos: bool = False
    prompt_logprobs: int | None = None

    def __post_init__(self) -> None:
        if self.temperature != 0:
            raise ValueError(f"temperature must be 0 (greedy), got {self.temperature!r}")
        if self.max_tokens is not None and not _is_int(self.max_tokens, least=1):
            raise ValueError(
                f"max_tokens must be an integer of at least 1, got {self.max_tokens!r}"
            )
        if self.stop_token_ids is None or isinstance(self.stop_token_ids, list):
            object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids or ()))
        if not isinstance(self.stop_token_ids, tuple) or not all(
            _is_int(token, least=0) for token in self.stop_token_ids
        ):
            raise ValueError(f"stop_token_ids must be token ids, got {self.stop_token_ids!r}")
        if not isinstance(self.ignore_eos, bool):
            raise ValueError(f"ignore_eos must be true or false, got {self.ignore_eos!r}")
        if self.prompt_logprobs is not None and not _is_int(self.prompt_logprobs, least=-1):
            raise ValueError(f"prompt_logprobs must be -1, 0 or more, got {self.prompt_logprobs!r}")


def _is_int(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least
