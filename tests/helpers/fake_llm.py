"""An `LLM` that a function stands in for, and lines of a batch for it."""

import json
from collections.abc import Callable, Iterator
from typing import Any

from glm53 import LLM, RequestOutput
from glm53.tokenizer import Tokenizer
from serving.options.engine_options import BUILT_IN_MODEL, model_path
from serving.requests.outputs import CompletionOutput

COMPLETIONS = "/v1/completions"


class FakeLLM(LLM):
    """Serves with a function in place of a model."""

    def __init__(self, serve: Callable[..., Iterator[tuple[int, RequestOutput]]]) -> None:
        self.tokenizer: Tokenizer | None = Tokenizer.from_dir(model_path(BUILT_IN_MODEL))
        self._serve = serve

    def serve(self, requests: Any, *, stream: bool = False) -> Any:
        return self._serve(requests)


def answer(index: int) -> tuple[int, RequestOutput]:
    part = CompletionOutput(0, f"answer {index}", [1], None, None, "stop", None)
    return index, RequestOutput(str(index), "x", [1, 2], None, [part], finished=True)


def one_by_one(requests: Any) -> Iterator[tuple[int, RequestOutput]]:
    """Answers each request before the next is drawn."""
    for index, _ in enumerate(requests):
        yield answer(index)


def line(custom_id: str, url: str = COMPLETIONS, **body: Any) -> bytes:
    request = {"custom_id": custom_id, "method": "POST", "url": url, "body": body}
    return json.dumps(request).encode() + b"\n"


def error_of(row: dict[str, Any]) -> tuple[str, str]:
    """Code and message of a row of a batch that is an error."""
    assert row.keys() == {"id", "custom_id", "response", "error"}
    assert row["response"] is None
    assert row["error"].keys() == {"code", "message", "line"}
    return row["error"]["code"], row["error"]["message"]
