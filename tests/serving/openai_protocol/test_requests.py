"""Bodies to requests, without a model."""

import re
from typing import Any

import pytest

from serving.openai_protocol import (
    APIRequest,
    RequestError,
    read_chat_request,
    read_completion_request,
)
from serving.requests.sampling_params import SamplingParams
from tests.serving.openai_protocol.bodies import NAMES, TOOLS, USER, chat, complete

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
