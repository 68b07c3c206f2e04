"""Text as it streams, and stop texts in it."""

import itertools
import json
import shutil
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import given

from glm53 import chat
from glm53.tokenizer import Tokenizer
from serving.options.engine_options import model_path
from serving.requests.output_text import OutputText

TOKENIZER = Tokenizer.from_dir(model_path("tiny"))
WORDS = st.lists(st.sampled_from(["a", "b", "ab", " a", "ba", "é", "😀", "\n"]), max_size=12)


def stream(text: str, one_by_one: bool = True, **options) -> list[str]:
    """The text shown after each token of `text`, then after the last."""
    output = OutputText(TOKENIZER, **options)
    shown = []
    ids = [TOKENIZER.encode(char) for char in text] if one_by_one else [TOKENIZER.encode(text)]
    for token in itertools.chain(*ids):
        output.push(token)
        shown.append(output.text)
        if output.stopped_by is not None:
            break
    output.finish()
    return [*shown, output.text]


@given(WORDS, st.lists(st.sampled_from(["a", "ab", "ba", "aab", "bé", "😀a", "\n"]), max_size=3))
def test_stops_where_the_whole_text_would(pieces: list[str], stop: list[str]) -> None:
    """Whatever the tokens, the text ends before the first stop text that is complete, and never
    shows a start of it that has to be taken back."""
    text = "".join(pieces)
    shown = stream(text, stop=stop)
    ends = [
        (end, start)
        for end in range(len(text) + 1)
        for start in range(end)
        if text[start:end] in stop
    ]
    expected = text[: min(ends)[1]] if ends else text
    assert shown[-1] == expected
    assert all(expected.startswith(part) for part in shown)
    assert all(later.startswith(sooner) for sooner, later in itertools.pairwise(shown))


def test_a_stop_within_a_token() -> None:
    """What a token holds behind the stop text is cut too; with it included, the cut is behind."""
    (token,) = TOKENIZER.encode(" the")
    for include, expected in ((False, " "), (True, " th")):
        output = OutputText(TOKENIZER, stop=["th"], include_stop=include)
        output.push(token)
        assert (output.text, output.stopped_by) == (expected, "th")
        output.finish()
        assert output.text == expected


def test_the_longer_of_two_stops_that_end_together() -> None:
    """The one that begins first is cut whole."""
    assert stream("xxaby", stop=["b", "ab"])[-1] == "xx"


def test_a_start_of_a_stop_is_shown_at_the_end() -> None:
    """Held back while it may become a stop text, shown once it cannot."""
    shown = stream("xab", stop=["abc"])
    assert shown == ["x", "x", "x", "xab"]
    assert stream("xabd", stop=["abc"]) == ["x", "x", "x", "xabd", "xabd"]


def test_a_stop_that_comes_too_early() -> None:
    """Before it counts, a stop text is text; one that ends later stops, wherever it began."""
    output = OutputText(TOKENIZER, stop=["ab"])
    for char, may_stop in (("a", False), ("b", False), ("a", False), ("b", True)):
        (token,) = TOKENIZER.encode(char)
        output.push(token, may_stop=may_stop)
    assert (output.text, output.stopped_by) == ("ab", "ab")


def test_half_a_character_is_never_shown() -> None:
    """Bytes wait for the rest of their character, and become U+FFFD if it never comes."""
    ids = [token for char in "é😀" for token in TOKENIZER.encode(char)]
    assert len(ids) > 2
    output = OutputText(TOKENIZER)
    for token in ids[:-1]:
        output.push(token)
        assert "\ufffd" not in output.text
    output.finish()
    assert output.text == "é\ufffd"


@pytest.mark.parametrize(("skip", "expected"), [(True, "ab"), (False, "a<|user|>b")])
def test_special_tokens(skip: bool, expected: str) -> None:
    """Left out of the text, or not."""
    output = OutputText(TOKENIZER, skip_special_tokens=skip)
    for token in TOKENIZER.encode("a<|user|>b"):
        output.push(token)
    output.finish()
    assert output.text == expected


def test_parts_of_an_output_whatever_is_special(tmp_path: Path) -> None:
    """Reasoning, content and calls are told apart also where the tokenizer marks their tags."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(model_path("tiny") / name, tmp_path / name)
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    for token in content["added_tokens"]:
        token["special"] = True
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    tokenizer = Tokenizer.from_dir(tmp_path)
    output = OutputText(tokenizer)
    call = "<tool_call>f<arg_key>k</arg_key><arg_value>v</arg_value></tool_call>"
    for token in tokenizer.encode(f"r</think>a{call}<|observation|>"):
        output.push(token)
    output.finish()
    message = chat.parse(output.text, [{"name": "f"}])
    assert message == chat.ParsedMessage("r", "a", (chat.ToolCall("f", {"k": "v"}),))
