"""JSON of bodies: what is read, and each fault that is told."""

from typing import Any

import pytest

from serving.openai_protocol import read_json


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
