import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from glm53.tokenizer import IncrementalDetokenizer, Tokenizer, decode_prompt

DATA = Path(__file__).parent.parent / "data" / "tokenizer"
CASES = json.loads((DATA / "cases.json").read_text(encoding="utf-8"))
TOKENIZER = Tokenizer.from_dir(DATA)
# The first 256 ids are the single bytes, which make the most broken characters.
IDS = st.lists(st.integers(0, 255) | st.integers(0, TOKENIZER.vocab_size + 63))


def streamed(tokenizer: Tokenizer, ids: list[int], skip: bool) -> str:
    """Returns the joined pieces of a detokenizer."""
    detokenizer = IncrementalDetokenizer(tokenizer, skip)
    return "".join([*(detokenizer.push(token_id) for token_id in ids), detokenizer.flush()])


@pytest.mark.parametrize("case", CASES["encode"], ids=lambda case: repr(case["text"][:24]))
def test_golden(case: dict[str, Any]) -> None:
    """A text encoded or decoded otherwise than the tokenizer that made the data does."""
    ids = case["ids"]
    assert TOKENIZER.encode(case["text"]) == ids
    assert TOKENIZER.decode(ids, skip_special_tokens=False) == case["decoded"]
    assert TOKENIZER.decode(ids) == case["decoded_skip_special"]
    assert streamed(TOKENIZER, ids, skip=False) == case["decoded"]
    assert streamed(TOKENIZER, ids, skip=True) == case["decoded_skip_special"]


@pytest.mark.parametrize("case", CASES["stream"], ids=lambda case: case["prefixes"][-1])
def test_golden_stream(case: dict[str, Any]) -> None:
    """A piece that differs from the decoding of its prefix by more than what is held back."""
    detokenizer = IncrementalDetokenizer(TOKENIZER, skip_special_tokens=False)
    text = ""
    for count, prefix in enumerate(case["prefixes"], start=1):
        text += detokenizer.push(case["ids"][count - 1])
        assert prefix in (text, text + "\ufffd")
        assert "\ufffd" not in text
        assert streamed(TOKENIZER, case["ids"][:count], skip=False) == prefix


@given(ids=IDS, skip=st.booleans())
def test_pieces_join_to_the_decoding(ids: list[int], skip: bool) -> None:
    """Streaming that disagrees with decoding, which random ids with broken UTF-8 would show."""
    detokenizer = IncrementalDetokenizer(TOKENIZER, skip)
    text = ""
    for count, token_id in enumerate(ids, start=1):
        text += detokenizer.push(token_id)
        decoded = TOKENIZER.decode(ids[:count], skip)
        assert decoded in (text, text + "\ufffd", text + "\ufffd\ufffd")
    assert text + detokenizer.flush() == TOKENIZER.decode(ids, skip)
    assert detokenizer.push(TOKENIZER.encode("a")[0]) == "a", "the last output left something"


@given(prompt=IDS, ids=IDS, skip=st.booleans())
def test_output_behind_a_prompt(prompt: list[int], ids: list[int], skip: bool) -> None:
    """A character that begins in the prompt, shown as U+FFFD once for each of its later bytes."""
    detokenizer = IncrementalDetokenizer(TOKENIZER, skip, prompt_ids=prompt)
    pieces = [*(detokenizer.push(token_id) for token_id in ids), detokenizer.flush()]
    prompt_bytes = [TOKENIZER.token_bytes(token_id, False) for token_id in prompt]
    output_bytes = [TOKENIZER.token_bytes(token_id, skip) for token_id in ids]
    shown = decode_prompt(TOKENIZER, prompt, ids, skip) + "".join(pieces)
    assert shown == b"".join(prompt_bytes + output_bytes).decode(errors="replace")
    again = [*(detokenizer.push(token_id) for token_id in ids), detokenizer.flush()]
    assert again == pieces, "the last output left something"


def test_prompt_within_a_character() -> None:
    """The example: two bytes of a character in the prompt, two in the output, or none."""
    ids = [TOKENIZER.encode(character)[0] for character in "a"]
    ids += TOKENIZER.encode("😀")
    assert len(ids) == 4
    for place in range(2, 4):
        detokenizer = IncrementalDetokenizer(TOKENIZER, prompt_ids=ids[:place])
        assert "".join(map(detokenizer.push, ids[place:])) + detokenizer.flush() == "😀"
        assert decode_prompt(TOKENIZER, ids[:place], ids[place:]) == "a"
        assert detokenizer.push(ids[0]) == "a"
        assert decode_prompt(TOKENIZER, ids[:place], ids[:1]) == "a\ufffd"
        assert decode_prompt(TOKENIZER, ids[:place], []) == "a\ufffd"


@given(text=st.text(), skip=st.booleans())
def test_text_never_shows_half_a_character(text: str, skip: bool) -> None:
    """U+FFFD in the stream of a text that has none."""
    detokenizer = IncrementalDetokenizer(TOKENIZER, skip)
    ids = TOKENIZER.encode(text)
    pieces = [detokenizer.push(token_id) for token_id in ids]
    assert "".join(pieces) == TOKENIZER.decode(ids, skip)
    assert detokenizer.flush() == ""
    if not skip:
        assert "".join(pieces) == text


def test_vocabulary() -> None:
    """Ids that differ from the file's."""
    assert TOKENIZER.vocab_size == 1536
    assert TOKENIZER.token_to_id("<|user|>") == 1507
    assert TOKENIZER.token_to_id("<|nobody|>") is None
    assert TOKENIZER.eos_token_id == 1500
    assert TOKENIZER.decode([64, 1536, 1599]) == "a", "a padded id stands for nothing"


def test_text_with_half_a_character_is_refused() -> None:
    """A lone surrogate, which a JSON request may hold, that breaks encoding with a TypeError."""
    with pytest.raises(ValueError, match="surrogate"):
        TOKENIZER.encode("a\ud800")


def copy_data(path: Path, **changed: Any) -> Path:
    """Returns a folder with the tokenizer's files, with other values in the configuration."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DATA / name, path / name)
    config = json.loads((DATA / "tokenizer_config.json").read_text(encoding="utf-8"))
    (path / "tokenizer_config.json").write_text(json.dumps(config | changed))
    return path


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_missing_or_broken_file_is_named(tmp_path: Path, name: str) -> None:
    """An error that does not say which file to look at."""
    file = copy_data(tmp_path) / name
    file.write_text('{"version": ')
    with pytest.raises(ValueError, match=str(file)):
        Tokenizer.from_dir(tmp_path)
    file.unlink()
    with pytest.raises(FileNotFoundError, match=str(file)):
        Tokenizer.from_dir(tmp_path)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"added_tokens_decoder": {"1501": {"content": "<|user|>"}}}, "1501, but 1507"),
        ({"added_tokens_decoder": {"x": {"content": "<|user|>"}}}, "'x' is no token id"),
        ({"added_tokens_decoder": {"1507": {}}}, "content string"),
        ({"added_tokens_decoder": []}, "expected an object"),
        ({"eos_token": 5}, "eos_token"),
        ({"eos_token": "<|stop|>"}, "not in the vocabulary"),
    ],
)
def test_wrong_configuration(tmp_path: Path, changed: dict[str, Any], message: str) -> None:
    """Files of two tokenizers mixed, or a configuration that cannot be meant."""
    with pytest.raises(ValueError, match=message):
        Tokenizer.from_dir(copy_data(tmp_path, **changed))


def test_configuration_variants(tmp_path: Path) -> None:
    """An end token given as an object, or none, refused."""
    path = copy_data(tmp_path, eos_token={"content": "<|user|>"}, added_tokens_decoder={})
    assert Tokenizer.from_dir(path).eos_token_id == 1507
    assert Tokenizer.from_dir(copy_data(tmp_path, eos_token=None)).eos_token_id is None


def test_other_kind_of_tokenizer_is_refused(tmp_path: Path) -> None:
    """A tokenizer whose tokens are no byte strings, which streaming would spoil."""
    file = copy_data(tmp_path) / "tokenizer.json"
    content = json.loads(file.read_text(encoding="utf-8"))
    file.write_text(json.dumps(content | {"decoder": {"type": "Fuse"}}))
    with pytest.raises(ValueError, match="ByteLevel"):
        Tokenizer.from_dir(tmp_path)


def test_added_token_outside_latin_1(tmp_path: Path) -> None:
    """An added token, kept as plain text, taken for the bytes of a vocabulary entry."""
    file = copy_data(tmp_path) / "tokenizer.json"
    content = json.loads(file.read_text(encoding="utf-8"))
    content["added_tokens"].append(content["added_tokens"][-1] | {"id": 1536, "content": "<新 é>"})
    file.write_text(json.dumps(content))
    tokenizer = Tokenizer.from_dir(tmp_path)
    assert tokenizer.encode("a<新 é>b") == [64, 1536, 65]
    for skip, text in ((False, "a<新 é>b"), (True, "ab")):
        assert tokenizer.decode([64, 1536, 65], skip) == text
        assert streamed(tokenizer, [64, 1536, 65], skip) == text


def test_tags_are_text_whatever_is_marked(tmp_path: Path) -> None:
    """A tag that is left out of an output with the special tokens, so that no parser sees it."""
    file = copy_data(tmp_path) / "tokenizer.json"
    content = json.loads(file.read_text(encoding="utf-8"))
    for token in content["added_tokens"]:
        token["special"] = True
    file.write_text(json.dumps(content))
    tokenizer = Tokenizer.from_dir(tmp_path)
    tagged = "r<think></think>a<tool_call>f<arg_key>k</arg_key><arg_value>v</arg_value></tool_call>"
    for token in ("<|user|>", "<|observation|>", "<|endoftext|>"):
        ids = tokenizer.encode(tagged + token)
        for text in (tokenizer.decode(ids), streamed(tokenizer, ids, skip=True)):
            assert text == tagged
        for text in (tokenizer.decode(ids, False), streamed(tokenizer, ids, skip=False)):
            assert text == tagged + token


def test_cut_and_padding_are_off(tmp_path: Path) -> None:
    """A file whose truncation or padding would change a prompt."""
    file = copy_data(tmp_path) / "tokenizer.json"
    content = json.loads(file.read_text(encoding="utf-8"))
    content["truncation"] = {
        "direction": "Right",
        "max_length": 3,
        "strategy": "LongestFirst",
        "stride": 0,
    }
    content["padding"] = {
        "strategy": {"Fixed": 8},
        "direction": "Left",
        "pad_to_multiple_of": None,
        "pad_id": 0,
        "pad_type_id": 0,
        "pad_token": "!",
    }
    file.write_text(json.dumps(content))
    tokenizer = Tokenizer.from_dir(tmp_path)
    assert tokenizer.encode("Hello world") == TOKENIZER.encode("Hello world")
    assert tokenizer.encode("a") == TOKENIZER.encode("a")
