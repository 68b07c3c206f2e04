import json
import logging
from pathlib import Path
from typing import Any

import pytest

from glm53.chat import TEMPLATES, ends_in_reasoning, parse, render

DATA = Path(__file__).parents[2] / "data" / "chat"
CASES = [json.loads(line) for line in (DATA / "cases.jsonl").read_text("utf-8").splitlines()]

USER = {"role": "user", "content": "q"}
NOW = {"type": "function", "function": {"name": "now", "strict": True, "parameters": {}}}
CALL = {"id": "a", "function": {"name": "now", "arguments": {}}}


def assistant(content: Any = None, **fields: Any) -> dict[str, Any]:
    """Returns an assistant message."""
    return {"role": "assistant", "content": content, **fields}


def tool(content: Any, **fields: Any) -> dict[str, Any]:
    """Returns a tool message."""
    return {"role": "tool", "content": content, **fields}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["id"])
def test_golden(case: dict[str, Any]) -> None:
    """A prompt that differs by a byte from GLM-5.3's, or bad messages that make one."""
    if "error" in case:
        with pytest.raises(ValueError, match=r"^messages\[\d\]\."):
            render(case["messages"], case["tools"], **case["kwargs"])
    else:
        assert render(case["messages"], case["tools"], **case["kwargs"]) == case["prompt"]


HISTORY = [USER, assistant("a", reasoning_content=" r "), USER, assistant("b"), USER]
TURN = [USER, assistant("a", reasoning_content=" r ", tool_calls=[CALL]), tool("1"), assistant("b")]


@pytest.mark.parametrize(
    ("model", "options", "prompt"),
    [
        ("glm-5.2", {}, "<|system|>Reasoning Effort: Max<|user|>q<|assistant|><think>"),
        (
            "glm-5.2",
            {"reasoning_effort": "high"},
            "<|system|>Reasoning Effort: High<|user|>q<|assistant|><think>",
        ),
        (
            "glm-5.2",
            {"reasoning_effort": "low"},
            "<|system|>Reasoning Effort: Max<|user|>q<|assistant|><think>",
        ),
        ("glm-5.2", {"enable_thinking": False}, "<|user|>q<|assistant|><think></think>"),
        ("glm-5.1", {"enable_thinking": True}, "<|user|>q<|assistant|><think>"),
        ("glm-5.1", {"enable_thinking": False}, "<|user|>q<|assistant|></think>"),
        ("glm-5", {}, "<|user|>q<|assistant|><think>"),
        ("glm-5", {"enable_thinking": False}, "<|user|>q<|assistant|></think>"),
    ],
)
def test_generation_prompts(model: str, options: dict[str, Any], prompt: str) -> None:
    """A model's effort line or opening of the next turn in another model's prompt."""
    rendered = render([USER], model=model, add_generation_prompt=True, **options)
    assert rendered == f"[gMASK]<sop>{prompt}"


@pytest.mark.parametrize(
    ("model", "options", "history", "turn"),
    [
        ("glm-5.3", {}, ("<think> r </think>", "<think></think>"), ("<think> r </think>", None)),
        ("glm-5.2", {}, ("<think></think>", "<think></think>"), ("<think> r </think>", None)),
        (
            "glm-5.2",
            {"clear_thinking": False},
            ("<think> r </think>", "<think></think>"),
            ("<think> r </think>", None),
        ),
        ("glm-5.1", {}, ("</think>", "</think>"), ("<think> r </think>", "<think></think>")),
        (
            "glm-5.1",
            {"clear_thinking": False, "enable_thinking": False},
            ("<think> r </think>", "</think>"),
            ("<think> r </think>", "</think>"),
        ),
        ("glm-5", {}, ("</think>", "</think>"), ("<think>r</think>", "</think>")),
    ],
)
def test_past_reasoning(
    model: str,
    options: dict[str, Any],
    history: tuple[str, str],
    turn: tuple[str, str | None],
) -> None:
    """Reasoning kept where the model's template clears it, or cleared in another model's way."""
    rendered = render(HISTORY, model=model, **options)
    assert rendered.endswith(
        f"<|user|>q<|assistant|>{history[0]}a<|user|>q<|assistant|>{history[1]}b<|user|>q"
    )
    rendered = render(TURN, model=model, **options)
    assert rendered.endswith(
        f"<|user|>q<|assistant|>{turn[0]}a<tool_call>now</tool_call>"
        "<|observation|><tool_response>1</tool_response>"
        f"<|assistant|>{turn[1] or '<think></think>'}b"
    )


@pytest.mark.parametrize(
    ("model", "line"),
    [
        ("glm-5.3", '{"name": "now", "parameters": {}}'),
        ("glm-5.2", '{"name": "now", "parameters": {}}'),
        ("glm-5.1", '{"name": "now", "parameters": {}}'),
        ("glm-5", json.dumps(NOW)),
    ],
)
def test_tool_lines(model: str, line: str) -> None:
    """A tool unwrapped for a model that saw the whole object, or the other way round."""
    assert f"<tools>\n{line}\n</tools>" in render([USER], [NOW], model=model)


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        (["q"], r"messages\[0\]: expected an object, got str"),
        ([USER, {"content": "q"}], r"messages\[1\]\.role: expected a string, got NoneType"),
        ([{"role": "user", "content": 1}], r"messages\[0\]\.content: .* got int"),
        ([{"role": "user", "content": [1]}], r"messages\[0\]\.content\[0\]: .* got int"),
        ([{"role": "user", "content": [{"text": "q"}]}], r"messages\[0\]\.content\[0\]\.type: "),
        ([{"role": "user", "content": [{"type": "text"}]}], r"messages\[0\]\.content\[0\]\.text: "),
        ([assistant(reasoning_content=["r"])], r"messages\[0\]\.reasoning_content: .* got list"),
        ([assistant(tool_calls="now")], r"messages\[0\]\.tool_calls: expected a list, got str"),
        ([assistant(tool_calls=["now"])], r"messages\[0\]\.tool_calls\[0\]: .* got str"),
        ([assistant(tool_calls=[{"id": "a"}])], r"messages\[0\]\.tool_calls\[0\]\.name: "),
        (
            [assistant(tool_calls=[{"function": "now"}])],
            r"messages\[0\]\.tool_calls\[0\]\.function: expected an object, got str",
        ),
        (
            [assistant(tool_calls=[{"function": {"name": "now", "arguments": "{}"}}])],
            r"messages\[0\]\.tool_calls\[0\]\.function\.arguments: .*; see read_messages",
        ),
        (
            [assistant(tool_calls=[{"name": "now", "arguments": {"x": {1}}}])],
            r"messages\[0\]\.tool_calls\[0\]\.arguments\.x: not a JSON value",
        ),
        ([tool([{"output": "1"}, "2"])], r"messages\[0\]\.content\[1\]\.output: missing"),
        ([tool([{"output": 1}])], r"messages\[0\]\.content\[0\]\.output: .* got int"),
        (
            [tool([{"type": "tool_reference", "name": "later"}])],
            r"messages\[0\]\.content\[0\]\.name: tools has no 'later'",
        ),
    ],
)
def test_malformed_message(messages: list[Any], message: str) -> None:
    """A bad message that makes a prompt, or an error without its place."""
    with pytest.raises(ValueError, match=message):
        render(messages, [NOW])


@pytest.mark.parametrize(
    ("tools", "message"),
    [
        ("now", "tools: expected a list, got str"),
        (["now"], r"tools\[0\]: expected an object, got str"),
        ([NOW, {"function": "now"}], r"tools\[1\]\.function: expected an object, got str"),
        ([{"function": {}}], r"tools\[0\]\.function\.name: "),
        ([{"type": "function"}], r"tools\[0\]\.name: "),
        ([{"name": "now", "parameters": {1}}], r"tools\[0\]\.parameters: not a JSON value"),
    ],
)
def test_malformed_tool(tools: Any, message: str) -> None:
    """A bad tool that makes a prompt, or an error without its place."""
    with pytest.raises(ValueError, match=message):
        render([USER], tools)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"thinking": False}, "unknown option of the chat template: thinking"),
        ({"model": "glm-6"}, "model: expected one of glm-5.3, .*, got 'glm-6'"),
        ({"clear_thinking": "false"}, "clear_thinking: expected a bool, got 'false'"),
        ({"enable_thinking": 0}, "enable_thinking: expected a bool, got 0"),
        (
            {"add_generation_prompt": True, "continue_final_message": True},
            "are both true: to continue the last message, pass add_generation_prompt=False",
        ),
    ],
)
def test_wrong_option(options: dict[str, Any], message: str) -> None:
    """A misspelt option that is silently without effect."""
    with pytest.raises(ValueError, match=message):
        render([USER], **options)


@pytest.mark.parametrize(
    ("model", "options", "message", "end"),
    [
        ("glm-5.3", {}, USER, "<|user|>q"),
        ("glm-5.3", {}, {"role": "system", "content": "s"}, "<|system|>s"),
        ("glm-5.3", {}, {"role": "user", "content": " q \n"}, "<|user|> q \n"),
        ("glm-5.3", {}, assistant(" So \n"), "<|assistant|><think></think>So"),
        ("glm-5.3", {}, assistant("So", reasoning_content="r"), "<|assistant|><think>r</think>So"),
        ("glm-5.3", {}, assistant("", reasoning_content="r"), "<|assistant|><think>r</think>"),
        ("glm-5.3", {}, assistant(reasoning_content="r "), "<|assistant|><think>r "),
        ("glm-5.3", {}, assistant(), "<|assistant|><think>"),
        ("glm-5.1", {"enable_thinking": False}, assistant(), "<|assistant|></think>"),
        ("glm-5.1", {}, assistant("So"), "<|assistant|><think></think>So"),
        ("glm-5", {}, assistant("So"), "<|assistant|></think>So"),
        ("glm-5", {}, assistant(reasoning_content="r"), "<|assistant|><think>r"),
    ],
)
def test_last_message_that_the_model_continues(
    model: str, options: dict[str, Any], message: dict[str, Any], end: str
) -> None:
    """A last message that is closed, or told apart from a whole one in what is not its end."""
    prompt = render([USER], model=model, **options)
    options["continue_final_message"] = True
    assert render([USER, message], model=model, **options) == prompt + end
    assert ends_in_reasoning(prompt + end) == ("<think>" in end and "</think>" not in end)


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "there is no message to continue"),
        ([USER, tool("1")], "the last message has role 'tool', which cannot be continued"),
        ([USER, assistant("a", tool_calls=[CALL])], r"messages\[1\]\.tool_calls end the message"),
    ],
)
def test_last_message_that_cannot_be_continued(messages: list[Any], message: str) -> None:
    """A continuation of what has an end, which the model would not understand."""
    with pytest.raises(ValueError, match=f"continue_final_message: {message}"):
        render(messages, continue_final_message=True)


@pytest.mark.parametrize(
    ("messages", "options", "warning"),
    [
        ([USER], {"enable_thinking": False}, "enable_thinking is ignored: glm-5.3 always thinks"),
        (
            [USER],
            {"model": "glm-5", "reasoning_effort": "high"},
            "reasoning_effort is ignored: glm-5 has no effort levels",
        ),
        ([USER, {"role": "developer", "content": "x"}], {}, "messages[1] is ignored: no role"),
        (
            [{"role": "user", "content": ["q", {"type": "file"}]}],
            {},
            "messages[0].content[1] is ignored: no part type 'file'",
        ),
    ],
)
def test_what_is_ignored_is_logged(
    messages: list[Any],
    options: dict[str, Any],
    warning: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Input dropped without a word, or dropped input that changes the prompt."""
    with caplog.at_level(logging.WARNING):
        rendered = render(messages, **options)
    assert warning in caplog.text
    assert rendered == render([USER], model=options.get("model", "glm-5.3"))


@pytest.mark.parametrize(
    ("calls", "results", "order"),
    [
        (["a", "b", "c"], ["c", "a"], "ac"),
        ([None, "b", "c"], ["c", "b"], "cb"),
        (["a", "a", "b"], ["b", "a"], "ba"),
        (["a", "b"], ["b", ""], "b-"),
        (["a", ["b"]], [["b"], "a"], "-a"),
    ],
)
def test_order_of_results(calls: list[Any], results: list[Any], order: str) -> None:
    """Results reordered on ids that do not tell which call they answer, or left out of order."""
    call = {"name": "now", "arguments": {}}
    asked = assistant(tool_calls=[call | {"id": call_id} for call_id in calls])
    answers = [
        tool(call_id if isinstance(call_id, str) and call_id else "-", tool_call_id=call_id)
        for call_id in results
    ]
    expected = "".join(f"<tool_response>{text}</tool_response>" for text in order)
    assert render([asked, *answers]).endswith(f"<|observation|>{expected}")
    asked["role"] = "user"
    unordered = "".join(f"<tool_response>{item['content']}</tool_response>" for item in answers)
    assert render([asked, *answers]).endswith(f"<|observation|>{unordered}")


@pytest.mark.parametrize("model", TEMPLATES)
def test_a_turn_extends_the_prompt(model: str) -> None:
    """A parsed turn that renders to other text than the model wrote: no prefix would be cached."""
    prompt = render([USER], [NOW], model=model, add_generation_prompt=True)
    reasoning = "r\n" if model != "glm-5" else "r"
    output = f"{reasoning}</think>text<tool_call>now<arg_key>x</arg_key><arg_value>1</arg_value>"
    output += "</tool_call>"
    message = parse(output, [NOW])
    turn = assistant(
        message.content,
        reasoning_content=message.reasoning,
        tool_calls=[
            {"name": call.name, "arguments": call.arguments} for call in message.tool_calls
        ],
    )
    assert render([USER, turn], [NOW], model=model) == prompt + output
