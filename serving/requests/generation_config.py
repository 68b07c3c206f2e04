"""Sampling defaults of a checkpoint's `generation_config.json`."""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from serving.requests.sampling_params import SamplingParams

_FIELDS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


@dataclasses.dataclass(frozen=True)
class GenerationConfig:
    """A model's own choices.

    Attributes:
        sampling: values for fields of `SamplingParams` that a caller leaves out.
        eos_token_ids: ids that end an output, besides those of `config.json`.
    """

    sampling: Mapping[str, Any]
    eos_token_ids: frozenset[int]

    @classmethod
    def from_dir(cls, path: Path, vocab_size: int) -> "GenerationConfig":
        """Reads the file of a checkpoint directory; without one, nothing is said.

        `do_sample` false, without a temperature, is temperature 0, as in transformers.

        Raises:
            ValueError: it is damaged, or a value is out of range.
        """
        file = path / "generation_config.json"
        if not file.is_file():
            return cls({}, frozenset())
        try:
            fields = json.loads(file.read_text(encoding="utf-8"))
            if not isinstance(fields, dict):
                raise ValueError(f"expected an object, got {type(fields).__name__}")
            sampling = {name: fields[name] for name in _FIELDS if fields.get(name) is not None}
            if fields.get("do_sample") is False:
                sampling.setdefault("temperature", 0.0)
            SamplingParams(**sampling)
            return cls(sampling, _token_ids(fields.get("eos_token_id"), vocab_size))
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{file}: {error}") from error


def _token_ids(value: Any, vocab_size: int) -> frozenset[int]:
    ids = [] if value is None else value if isinstance(value, list) else [value]
    for token in ids:
        if type(token) is not int or not 0 <= token < vocab_size:
            raise ValueError(f"eos_token_id {token!r} is not an id below vocab_size {vocab_size}")
    return frozenset(ids)
