"""Outputs to bodies of responses, without a model."""

import json
from typing import Any

import numpy as np
import pytest

from glm53.tokenizer import Tokenizer
from serving.openai_protocol import APIRequest
from serving.options.engine_options import BUILT_IN_MODEL, model_path
from serving.requests.outputs import CompletionOutput, RequestOutput, TokenLogprobs
from tests.serving.openai_protocol.bodies import TOOLS, chat, complete

CALL = "<tool_call>weather<arg_key>city</arg_key><arg_value>Köln</arg_value>"
CALL += "<arg_key>days</arg_key><arg_value>3</arg_value></tool_call>"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_dir(model_path(BUILT_IN_MODEL))


def logprobs(token: int, best: list[int], rank: int) -> TokenLogprobs:
    """The best have -0.5, -1.5, ..., the token the value of its rank."""
    values = -0.5 - np.arange(len(best), dtype=np.float32)
    return TokenLogprobs(token, 0.5 - rank, rank, np.array(best, np.int32), values, None)


def output(
    prompt: str | None,
    prompt_ids: list[int],
    *parts: CompletionOutput,
    prompt_logprobs: list[TokenLogprobs | None] | None = None,
) -> RequestOutput:
    return RequestOutput("0", prompt, prompt_ids, prompt_logprobs, list(parts), finished=True)


def part(
    text: str, token_ids: list[int], finish: Any = "stop", index: int = 0, **fields: Any
) -> CompletionOutput:
    given = {"cumulative_logprob": None, "logprobs": None, "stop_reason": None, **fields}
    return CompletionOutput(
        index=index, text=text, token_ids=token_ids, finish_reason=finish, **given
    )


def test_chat_response(tokenizer: Tokenizer) -> None:
    """Every field of a response with two choices; reasoning is split off."""
    request = chat(model="tiny", n=2)
    parts = (
        part("Hm.</think>Yes.", [1, 2, 3]),
        part("Hm", [1, 2], "length", index=1),
    )
    body = request.respond([output("<|assistant|><think>", [9, 8], *parts)], tokenizer, "abc", 1234)
    assert body == {
        "id": "chatcmpl-abc",
        "object": "chat.completion",
        "created": 1234,
        "model": "tiny",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "Yes.", "reasoning": "Hm."},
                "logprobs": None,
                "finish_reason": "stop",
                "stop_reason": None,
            },
            {
                "index": 1,
                "message": {"role": "assistant", "content": None, "reasoning": "Hm"},
                "logprobs": None,
                "finish_reason": "length",
                "stop_reason": None,
            },
        ],
        "usage": {"prompt_tokens": 2, "completion_tokens": 5, "total_tokens": 7},
    }


def choice_of(request: APIRequest, tokenizer: Tokenizer, made: RequestOutput) -> dict[str, Any]:
    (choice,) = request.respond([made], tokenizer, "abc", 1)["choices"]
    return choice


def test_continued_message(tokenizer: Tokenizer) -> None:
    """An output that goes on with reasoning, or with content, taken for the other."""
    for prompt, expected in (
        ("<|assistant|><think>Hm", {"content": "Yes.", "reasoning": " so"}),
        ("<|assistant|><think>Hm</think>It", {"content": " so</think>Yes.", "reasoning": None}),
        (
            "<|assistant|><think></think>a<|user|><think>",
            {"content": " so</think>Yes.", "reasoning": None},
        ),
    ):
        made = output(prompt, [9], part(" so</think>Yes.", [1]))
        message = choice_of(chat(), tokenizer, made)["message"]
        assert message == {"role": "assistant", **expected}


def test_answer_without_thinking(tokenizer: Tokenizer) -> None:
    """A prompt that does not end within the reasoning, as earlier models' can."""
    made = output("<|assistant|><think></think>", [9], part("Yes.", [1]))
    message = choice_of(chat(), tokenizer, made)["message"]
    assert message == {"role": "assistant", "content": "Yes.", "reasoning": None}


def test_tool_calls(tokenizer: Tokenizer) -> None:
    """Calls have ids of their own and arguments in JSON text, and give the finish reason."""
    made = output("<|assistant|><think>", [9], part(f"</think>Let me see.{CALL}{CALL}", [1]))
    choice = choice_of(chat(tools=TOOLS), tokenizer, made)
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] == "Let me see."
    calls = choice["message"]["tool_calls"]
    assert len({call["id"] for call in calls}) == 2
    for call in calls:
        assert call["type"] == "function"
        assert call["function"]["name"] == "weather"
        assert json.loads(call["function"]["arguments"]) == {"city": "Köln", "days": 3}


@pytest.mark.parametrize("finish", ["stop", "length"])
def test_tool_call_that_is_broken_off(tokenizer: Tokenizer, finish: str) -> None:
    """It is shown with the arguments that are complete, but not as one to be made."""
    cut = CALL.partition("<arg_key>days")[0]
    made = output("<|assistant|><think>", [9], part(f"</think>{cut}", [1], finish))
    choice = choice_of(chat(tools=TOOLS), tokenizer, made)
    assert choice["finish_reason"] == finish
    (call,) = choice["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {"city": "Köln"}


def test_tools_that_were_not_offered(tokenizer: Tokenizer) -> None:
    """Without tools a call is text."""
    made = output("<|assistant|><think>", [9], part(f"</think>{CALL}", [1]))
    choice = choice_of(chat(tools=TOOLS, tool_choice="none"), tokenizer, made)
    assert choice["finish_reason"] == "stop"
    assert choice["message"]["content"] == CALL


def test_chat_logprobs(tokenizer: Tokenizer) -> None:
    """Tokens with their text and bytes, also of a token that is half a character, and -inf as a
    number that JSON has."""
    half = next(id for id in range(1500) if tokenizer.token_bytes(id, False) == b"\xc3")
    the, of = tokenizer.encode("The")[0], tokenizer.encode(" of")[0]
    best = np.array([the, of], np.int32), np.array([-0.5, -1.5], np.float32)
    entries = [
        TokenLogprobs(the, -0.5, 1, *best, None),
        TokenLogprobs(half, float("-inf"), 1600, *best, None),
    ]
    request = chat(logprobs=True, top_logprobs=2)
    made = output("<|assistant|><think>", [9], part("The", [the, half], logprobs=entries))
    first, second = choice_of(request, tokenizer, made)["logprobs"]["content"]
    expected = [
        {"token": "The", "logprob": -0.5, "bytes": list(b"The")},
        {"token": " of", "logprob": -1.5, "bytes": list(b" of")},
    ]
    assert first == {**expected[0], "top_logprobs": expected}
    assert second == {
        "token": "bytes:\\xc3",
        "logprob": -9999.0,
        "bytes": [0xC3],
        "top_logprobs": expected,
    }


def test_prompt_logprobs(tokenizer: Tokenizer) -> None:
    """As vLLM's: in a chat beside the choices, in a completion within each."""
    found = [None, logprobs(7, [6], 2)]
    expected = [
        None,
        {
            "6": {"logprob": -0.5, "rank": 1, "decoded_token": None},
            "7": {"logprob": -1.5, "rank": 2, "decoded_token": None},
        },
    ]
    made = output("<|assistant|><think>", [5, 7], part("x", [1]), prompt_logprobs=found)
    body = chat(prompt_logprobs=1).respond([made], tokenizer, "abc", 1)
    assert body["prompt_logprobs"] == expected
    assert choice_of(complete(prompt_logprobs=1), tokenizer, made)["prompt_logprobs"] == expected


def test_completion_response(tokenizer: Tokenizer) -> None:
    """Choices are numbered over prompts and continuations; a prompt's tokens count once."""
    request = complete(prompt=["a", "b"], n=2)
    outputs = [
        output("a", [1], part("A", [1, 2]), part("B", [3], index=1)),
        output("b", [1, 2], part("C", [1], stop_reason="x"), part("D", [3], "length", index=1)),
    ]
    body = request.respond(outputs, tokenizer, "abc", 1234)
    choices = body.pop("choices")
    assert body == {
        "id": "cmpl-abc",
        "object": "text_completion",
        "created": 1234,
        "model": "path/to/tiny",
        "usage": {"prompt_tokens": 3, "completion_tokens": 5, "total_tokens": 8},
    }
    assert [choice["index"] for choice in choices] == [0, 1, 2, 3]
    assert [choice["text"] for choice in choices] == ["A", "B", "C", "D"]
    assert [choice["stop_reason"] for choice in choices] == [None, None, "x", None]
    assert [choice["finish_reason"] for choice in choices] == ["stop", "stop", "stop", "length"]
    assert all(choice["logprobs"] is None for choice in choices)


def test_completion_logprobs(tokenizer: Tokenizer) -> None:
    """Tokens, values and offsets in the choice's text, of which the stop's tokens have no part."""
    ids = tokenizer.encode("The é of")
    assert len(ids) == 5  # A space and "é", in two halves, are three.
    entries = [logprobs(token, [ids[0], ids[4]], 3) for token in ids]
    made = output("x", [9], part("The é", ids, logprobs=entries, stop_reason=" of"))
    found = choice_of(complete(logprobs=2), tokenizer, made)["logprobs"]
    assert found["tokens"][0] == "The"
    assert found["tokens"][2:] == ["bytes:\\xc3", "bytes:\\xa9", " of"]
    assert found["text_offset"] == [0, 3, 4, 4, 5]
    assert found["token_logprobs"] == [-2.5] * 5
    assert found["top_logprobs"][2] == {"The": -0.5, " of": -1.5, "bytes:\\xc3": -2.5}


@pytest.mark.parametrize("as_text", [True, False])
def test_echo(tokenizer: Tokenizer, as_text: bool) -> None:
    """The prompt, given as text or ids, comes before the continuation in all of text, tokens,
    values and offsets; its first token has no log-probability."""
    prompt_ids, ids = tokenizer.encode("The Congress"), tokenizer.encode(" of")
    request = complete(echo=True, logprobs=0)
    made = output(
        "The Congress" if as_text else None,
        prompt_ids,
        part(" of", ids, logprobs=[logprobs(ids[0], [], 1)]),
        prompt_logprobs=[None, logprobs(prompt_ids[1], [], 2)],
    )
    choice = choice_of(request, tokenizer, made)
    assert choice["text"] == "The Congress of"
    assert choice["logprobs"] == {
        "tokens": ["The", " Congress", " of"],
        "token_logprobs": [None, -1.5, -0.5],
        "top_logprobs": [None, {" Congress": -1.5}, {" of": -0.5}],
        "text_offset": [0, 3, 12],
    }


def test_echo_alone(tokenizer: Tokenizer) -> None:
    """`max_tokens` 0 gives the prompt alone."""
    prompt_ids = tokenizer.encode("The Congress")
    made = output(
        None,
        prompt_ids,
        part("", [], "length", logprobs=[]),
        prompt_logprobs=[None, logprobs(prompt_ids[1], [7], 2)],
    )
    request = complete(echo=True, logprobs=1, max_tokens=0)
    body = request.respond([made], tokenizer, "abc", 1)
    (choice,) = body["choices"]
    assert body["usage"] == {"prompt_tokens": 2, "completion_tokens": 0, "total_tokens": 2}
    assert choice["text"] == "The Congress"
    assert choice["logprobs"]["tokens"] == ["The", " Congress"]
    assert choice["logprobs"]["text_offset"] == [0, 3]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("length", None)
