"""Parsed messages, whole or put together from deltas, in the form of the recorded cases."""

import contextlib
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from glm53.chat import (
    ContentDelta,
    Delta,
    ReasoningDelta,
    StreamingParser,
    ToolCallDelta,
    parse,
)

DATA = Path(__file__).parents[2] / "data" / "chat"
CASES = [json.loads(line) for line in (DATA / "parse_cases.jsonl").read_text("utf-8").splitlines()]
TOOLS = CASES[0]["tools"]
STRINGS = {"additionalProperties": {"type": "string"}}
STRING_TOOLS = [{"name": name, "parameters": STRINGS} for name in ("now", "typed", "typed_too")]


def joined(deltas: Iterable[Delta]) -> dict[str, Any]:
    """Returns the message that a client puts together from deltas, in the form of the data."""
    reasoning, content = "", ""
    names: list[str] = []
    arguments: list[str] = []
    for delta in deltas:
        match delta:
            case ReasoningDelta(text):
                assert text
                assert not content, "reasoning after content"
                assert not names, "reasoning after a call"
                reasoning += text
            case ContentDelta(text):
                assert text
                content += text
            case ToolCallDelta(index, name, text):
                if name is not None:
                    names.append(name)
                    arguments.append("")
                assert index == len(names) - 1, "a delta of a call that is not the newest"
                arguments[index] += text
    calls = []
    for name, text in zip(names, arguments, strict=True):
        decoded, complete = completed(text)
        calls.append({"name": name, "arguments": decoded} | ({} if complete else CUT))
    return {"reasoning": reasoning, "content": content, "tool_calls": calls}


CUT = {"complete": False}


def completed(arguments: str, **options: Any) -> tuple[Any, bool]:
    """Returns the arguments in JSON text that may be cut short, and whether it is not."""
    for end in ("", "}", '"}'):
        with contextlib.suppress(ValueError):
            return json.loads(arguments + end if arguments else "{}", **options), not end and bool(
                arguments
            )
    raise AssertionError(f"{arguments!r} begins no JSON object")


def arguments_of(deltas: Iterable[Delta]) -> str:
    """Returns the JSON text of all calls' arguments, joined."""
    return "".join(delta.arguments for delta in deltas if isinstance(delta, ToolCallDelta))


def stream(pieces: Iterable[str], tools: list[Any] | None, **options: Any) -> Iterator[Delta]:
    """Yields the deltas of an output given in pieces."""
    parser = StreamingParser(tools, **options)
    for piece in pieces:
        yield from parser.push(piece)
    yield from parser.finish()


def whole(text: str, tools: list[Any] | None, **options: Any) -> dict[str, Any]:
    """Returns a parsed message in the form of `joined`."""
    message = parse(text, tools, **options)
    assert message.reasoning != ""
    assert message.content != ""
    calls = [
        {"name": call.name, "arguments": call.arguments} | ({} if call.complete else CUT)
        for call in message.tool_calls
    ]
    return {
        "reasoning": message.reasoning or "",
        "content": message.content or "",
        "tool_calls": calls,
    }
