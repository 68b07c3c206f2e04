"""Bodies to requests and outputs to bodies, without a model."""

import json
import re
from typing import Any

import numpy as np
import pytest

from glm53.tokenizer import Tokenizer
from serving.openai_protocol import (
    APIRequest,
    RequestError,
    read_chat_request,
    read_completion_request,
    read_json,
)
from serving.options.engine_options import BUILT_IN_MODEL, model_path
from serving.requests.outputs import CompletionOutput, RequestOutput, TokenLogprobs
from serving.requests.sampling_params import SamplingParams

NAMES = ["path/to/tiny", "tiny"]
USER = [{"role": "user", "content": "Hi"}]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {"properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
        },
    }
]
CALL = "<tool_call>weather<arg_key>city</arg_key><arg_value>Köln</arg_value>"
CALL += "<arg_key>days</arg_key><arg_value>3</arg_value></tool_call>"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_dir(model_path(BUILT_IN_MODEL))


def chat(**fields: Any) -> APIRequest:
    return read_chat_request({"messages": USER, **fields}, NAMES)


def complete(**fields: Any) -> APIRequest:
    return read_completion_request({"prompt": "x", **fields}, NAMES)


# --- JSON ---


@pytest.mark.parametrize(
    ("text", "value"),
    [
        (
            '{"a": [1, 2.5, null, true, "\\u00e4\\ud83d\\ude00"]}',
            {"a": [1, 2.5, None, True, "ä😀"]},
        ),
        (" [1]\r\n", [1]),
        ("-" + "9" * 308, -int("9" * 308)),
        ("[" * 128 + "1" + "]" * 128, None),
    ],
)
def test_json_that_is_read(text: str, value: Any) -> None:
    """Plain JSON, as text and as bytes, up to the limits of depth and digits."""
    for data in (text, text.encode()):
        found, fault = read_json(data)
        assert fault is None
        assert value is None or found == value


@pytest.mark.parametrize(
    ("data", "fault"),
    [
        (b"", "not JSON: Expecting value: line 1 column 1 (char 0)"),
        (b"{'a': 1}", "not JSON: Expecting property name enclosed in double quotes"),
        (b"{} {}", "not JSON: Extra data"),
        (b'{"id": "x", "a": "\xff"}', "not UTF-8: invalid start byte at byte 18"),
        ('{"id": "x"}'.encode("utf-16"), "not UTF-8"),
        (b'{"id": "x", "a": 1, "a": 2}', "key 'a' appears twice in one object"),
        (b'{"id": "x", "b": [{"a": 1, "a": 1, "a": 1}]}', "key 'a' appears 3 times in one object"),
        (b'{"id": "x", "a": NaN}', "NaN is not valid JSON"),
        (b'{"id": "x", "a": -Infinity}', "-Infinity is not valid JSON"),
        (b'{"id": "x", "a": 1e999}', "a number is out of range: 1e999"),
        (b'{"id": "x", "a": ' + b"9" * 309 + b"}", "an integer has more than 308 digits"),
        (b'{"id": "x", "a": -' + b"9" * 9000 + b"}", "an integer has more than 308 digits"),
        (b'{"id": "x", "a": "\\ud800"}', "half a surrogate pair"),
        (b'{"id": "x", "\\uDC00": 1}', "half a surrogate pair"),
        ('{"id": "x", "a": "\ud800"}', "half a surrogate pair"),
        (b'{"id": "x", "a": ' + b"[" * 130 + b"]" * 130 + b"}", "nested more than 128 deep"),
        (b"[" * 1_000_000, "nested more than 128 deep"),
        (b'{"a":' * 1_000_000, "nested more than 128 deep"),
    ],
)
def test_json_that_is_not(data: bytes | str, fault: str) -> None:
    """Each fault is told, and what else the text says is still known where it can be."""
    value, found = read_json(data)
    assert found is not None
    assert fault in found
    if b'"id"' in (data if isinstance(data, bytes) else data.encode("utf-8", "replace")):
        assert value is None or value["id"] == "x"
        assert (value is None) == ("UTF-8" in fault)


# --- bodies that are understood ---


def test_defaults() -> None:
    """Completions stop at 16 tokens as OpenAI's do, a chat at the model's limit; sampling values
    that are left out are the model's own."""
    assert complete().params == SamplingParams(max_tokens=16)
    assert chat().params == SamplingParams(max_tokens=None)
    assert complete().prompts == ["x"]
    expected = {"messages": USER, "tools": None, "chat_template_kwargs": {}}
    assert chat().prompts == [expected]


SAMPLING: dict[str, Any] = {
    "temperature": 0.5,
    "top_p": 0.9,
    "top_k": 4,
    "min_p": 0.1,
    "repetition_penalty": 1.1,
    "presence_penalty": 0.2,
    "frequency_penalty": -0.3,
    "seed": 7,
    "n": 3,
    "stop": ["a", "b"],
    "stop_token_ids": [5],
    "include_stop_str_in_output": True,
    "ignore_eos": True,
    "min_tokens": 2,
    "allowed_token_ids": [5, 6],
    "bad_words": ["no"],
    "skip_special_tokens": False,
    "max_tokens": 9,
    "prompt_logprobs": 2,
}


def test_every_sampling_field() -> None:
    """Both routes hand on every field with its own name; bias keys become ids."""
    expected = SamplingParams(**SAMPLING, logit_bias={11: -5, 0: 2.5})
    for read in (chat, complete):
        assert read(**SAMPLING, logit_bias={"11": -5, "0": 2.5}).params == expected
    assert chat(stop="a").params.stop == ("a",)


def test_null_is_left_out() -> None:
    """Null means the default in every field that is not required."""
    names = [*SAMPLING, "logit_bias", "logprobs", "model", "user", "stream", "stream_options"]
    nulls = dict.fromkeys(names)
    assert chat(**nulls, tools=None, tool_choice=None).params == SamplingParams(max_tokens=None)
    assert complete(**nulls, suffix=None, best_of=None).params == SamplingParams(max_tokens=16)


def test_fields_that_change_nothing() -> None:
    """Bookkeeping, and the values that say what is done anyway."""
    harmless: dict[str, Any] = {
        "user": "u",
        "metadata": {"k": "v"},
        "store": True,
        "service_tier": "auto",
        "stream": False,
        "response_format": {"type": "text"},
    }
    assert chat(**harmless, parallel_tool_calls=True, tool_choice="auto").params == chat().params
    assert complete(**harmless, best_of=1).params == complete().params


def test_token_limits() -> None:
    """`max_completion_tokens` is the newer name of `max_tokens`."""
    assert chat(max_tokens=5).params.max_tokens == 5
    assert chat(max_completion_tokens=6).params.max_tokens == 6
    assert chat(max_completion_tokens=6, max_tokens=6).params.max_tokens == 6


def test_logprobs_of_chat() -> None:
    """True alone is the token's own; `top_logprobs` adds the best."""
    assert chat(logprobs=True).params.logprobs == 0
    assert chat(logprobs=True, top_logprobs=4).params.logprobs == 4
    assert chat(logprobs=False).params.logprobs is None


def test_logprobs_of_completions() -> None:
    """With `echo` they are the prompt's too."""
    assert complete(logprobs=2).params == SamplingParams(max_tokens=16, logprobs=2)
    echoed = complete(logprobs=2, echo=True, max_tokens=0).params
    assert echoed == SamplingParams(max_tokens=0, logprobs=2, prompt_logprobs=2)


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("a", ["a"]),
        (["a", "b"], ["a", "b"]),
        ([1, 2], [{"prompt_token_ids": [1, 2]}]),
        ([[1, 2], [3]], [{"prompt_token_ids": [1, 2]}, {"prompt_token_ids": [3]}]),
    ],
)
def test_forms_of_a_prompt(prompt: Any, expected: list) -> None:
    """Text, texts, ids, lists of ids."""
    assert complete(prompt=prompt).prompts == expected


def test_model_names() -> None:
    """The name given and its last part are the model's; what was asked for is told back."""
    for name in NAMES:
        assert chat(model=name).params == chat().params
    with pytest.raises(
        RequestError, match="model 'gpt' is not served, only 'path/to/tiny', 'tiny'"
    ):
        chat(model="gpt")
    with pytest.raises(RequestError) as caught:
        complete(model="gpt")
    assert caught.value.code == "model_not_found"
    with pytest.raises(RequestError, match="model must be a string, got 5"):
        chat(model=5)


def conversation(request: APIRequest) -> dict[str, Any]:
    (prompt,) = request.prompts
    assert isinstance(prompt, dict)
    return prompt


def test_conversation_is_left_to_its_reader() -> None:
    """Messages and how their text ends go on as they are, to be read as those of `LLM.chat` are."""
    messages = [{"role": "assistant", "content": "a", "reasoning": "b"}]
    prompt = conversation(chat(messages=messages, continue_final_message=True))
    assert prompt["messages"] is messages
    assert prompt["continue_final_message"] is True
    assert "add_generation_prompt" not in prompt


def test_template_options() -> None:
    """`reasoning_effort` goes to the template, as a field or among the options."""
    options = {"reasoning_effort": "low", "clear_thinking": True}
    assert conversation(chat(chat_template_kwargs=options))["chat_template_kwargs"] == options
    alone = conversation(chat(reasoning_effort="low"))
    assert alone["chat_template_kwargs"] == {"reasoning_effort": "low"}
    both = conversation(chat(reasoning_effort="low", chat_template_kwargs=options))
    assert both["chat_template_kwargs"] == options


def test_tool_choice() -> None:
    """Tools are offered unless the choice is none."""
    assert conversation(chat(tools=TOOLS))["tools"] == TOOLS
    assert conversation(chat(tools=TOOLS, tool_choice="auto"))["tools"] == TOOLS
    assert conversation(chat(tools=TOOLS, tool_choice="none"))["tools"] is None


# --- bodies that are refused ---

BOTH_REFUSE: list[tuple[dict[str, Any], str]] = [
    ({"max_new_tokens": 5}, "unknown field 'max_new_tokens'"),
    ({"guided_json": None}, "unknown field 'guided_json'"),
    ({"stream": True}, "stream True is not supported"),
    ({"stream": 0}, "stream 0 is not supported"),
    ({"stream_options": {"include_usage": True}}, "stream_options {'include_usage': True}"),
    ({"response_format": {"type": "json_object"}}, "response_format .*json_object.* 'text'"),
    ({"temperature": -1}, "temperature must be a number from 0 to 65536, got -1"),
    ({"temperature": "hot"}, "temperature must be .*got 'hot'"),
    ({"temperature": True}, "temperature must be .*got True"),
    ({"top_p": 0}, "top_p must be above 0"),
    ({"n": 0}, "n must be an integer from 1 to 128, got 0"),
    ({"n": 10**12}, "n must be an integer from 1 to 128, got 1000000000000"),
    ({"n": True}, "n must be an integer from 1 to 128, got True"),
    ({"seed": 2**64}, "seed must be at most 18446744073709551615"),
    ({"stop": [""]}, "stop must be texts that are not empty"),
    ({"stop": 5}, "stop must be texts"),
    (
        {"max_tokens": -1},
        "max_tokens must be an integer of at least ., got -1",
    ),
    ({"max_tokens": 1.0}, "max_tokens must be an integer .*got 1.0"),
    ({"min_tokens": 20, "max_tokens": 4}, "min_tokens 20 is more than max_tokens 4"),
    ({"presence_penalty": 3}, "presence_penalty must be a number from -2 to 2, got 3"),
    ({"logit_bias": []}, r"logit_bias must be an object, got \[\]"),
    ({"logit_bias": {"a": 1}}, "logit_bias has key 'a'"),
    ({"logit_bias": {"-1": 1}}, "logit_bias has key '-1'"),
    ({"logit_bias": {"9" * 5000: 1}}, "logit_bias has key '9+"),
    ({"logit_bias": {"1": 101}}, "logit_bias must map .*101"),
    ({"stop_token_ids": ["a"]}, "stop_token_ids must be token ids"),
    ({"allowed_token_ids": []}, "allowed_token_ids is empty"),
    ({"bad_words": "no"}, "bad_words must be texts"),
    ({"ignore_eos": 1}, "ignore_eos must be true or false, got 1"),
    ({"prompt_logprobs": -1}, "prompt_logprobs must be an integer from 0 to 20, got -1"),
]


@pytest.mark.usefixtures("as_a_user")
@pytest.mark.parametrize("read", [chat, complete])
@pytest.mark.parametrize(("fields", "message"), BOTH_REFUSE)
def test_refused_by_both(read: Any, fields: dict[str, Any], message: str) -> None:
    """The field and its value are named."""
    with pytest.raises(ValueError, match=message):
        read(**fields)


CHAT_REFUSES: list[tuple[dict[str, Any], str]] = [
    ({"prompt": "x"}, "unknown field 'prompt'"),
    ({"echo": True}, "unknown field 'echo'"),
    ({"tool_choice": "required"}, "tool_choice 'required' is not supported"),
    ({"tool_choice": {"type": "function"}}, "tool_choice {'type': 'function'} is not supported"),
    ({"tools": {}}, "tools must be a list, got {}"),
    ({"parallel_tool_calls": False}, "parallel_tool_calls False is not supported"),
    ({"max_tokens": 0}, "max_tokens must be an integer of at least 1, got 0"),
    ({"max_completion_tokens": 0}, "max_completion_tokens must be .*got 0"),
    ({"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens 3 and max_completion_tokens 4"),
    ({"logprobs": 1}, "logprobs must be true or false, got 1"),
    ({"top_logprobs": 2}, "top_logprobs 2 needs logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs must be .*from 0 to 20, got 21"),
    ({"reasoning_effort": 3}, "reasoning_effort must be a string, got 3"),
    ({"chat_template_kwargs": "x"}, "chat_template_kwargs must be an object, got 'x'"),
    ({"add_generation_prompt": "no"}, "add_generation_prompt must be true or false, got 'no'"),
    ({"continue_final_message": 1}, "continue_final_message must be true or false, got 1"),
    (
        {"reasoning_effort": "low", "chat_template_kwargs": {"reasoning_effort": "high"}},
        "reasoning_effort 'low' and chat_template_kwargs.reasoning_effort 'high' differ",
    ),
]


@pytest.mark.parametrize(("fields", "message"), CHAT_REFUSES)
def test_refused_by_chat(fields: dict[str, Any], message: str) -> None:
    """The field and its value are named."""
    with pytest.raises(ValueError, match=message):
        chat(**fields)


COMPLETION_REFUSES: list[tuple[dict[str, Any], str]] = [
    ({"prompt": None}, "prompt must be a text.*got None"),
    ({"prompt": []}, r"prompt must be a text.*got \[\]"),
    ({"prompt": 5}, "prompt must be a text.*got 5"),
    ({"prompt": ["a", [1]]}, "prompt must be a text"),
    ({"prompt": [1, "a"]}, "prompt must be a text"),
    ({"prompt": [True]}, "prompt must be a text"),
    ({"prompt": [1.5]}, "prompt must be a text"),
    ({"prompt": ["a"] * 2049}, "prompt has 2049 prompts, the limit is 2048"),
    ({"messages": USER}, "unknown field 'messages'"),
    ({"max_completion_tokens": 5}, "unknown field 'max_completion_tokens'"),
    ({"suffix": ""}, "suffix '' is not supported"),
    ({"best_of": 2}, "best_of 2 is not supported"),
    ({"best_of": True}, "best_of True is not supported"),
    ({"echo": 1}, "echo must be true or false, got 1"),
    ({"logprobs": True}, "logprobs must be an integer from 0 to 20, got True"),
    ({"logprobs": 21}, "logprobs must be an integer from 0 to 20, got 21"),
    ({"max_tokens": 0}, "max_tokens must be at least 1 without echo, got 0"),
    ({"echo": True, "logprobs": 1, "prompt_logprobs": 2}, "prompt_logprobs 2 with echo"),
]


@pytest.mark.parametrize(("fields", "message"), COMPLETION_REFUSES)
def test_refused_by_completions(fields: dict[str, Any], message: str) -> None:
    """The field and its value are named."""
    with pytest.raises(ValueError, match=message):
        complete(**fields)


@pytest.mark.parametrize("body", [None, [], "x", 5])
@pytest.mark.parametrize("read", [read_chat_request, read_completion_request])
def test_body_that_is_no_object(read: Any, body: Any) -> None:
    with pytest.raises(RequestError, match=re.escape(f"body must be an object, got {body!r}")):
        read(body, NAMES)


# --- responses ---


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
