import functools
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from glm53.chat.argument_types import (
    ANY,
    STRING,
    ArgumentTypes,
    Types,
    decode_argument,
    starts_string,
)


@pytest.mark.parametrize(
    ("text", "schema", "value"),
    [
        ("42", {"type": ["string"]}, "42"),
        ('"NaN"', {"type": "number"}, "NaN"),
        ("42", {"type": ["string", "null"]}, "42"),
        ("null", {"anyOf": [{"type": "string"}, {"type": "null"}]}, None),
        ("None", {"type": ["string", "null"]}, None),
        ("true", {"type": ["string", "integer"]}, "true"),
        ("3", {"type": ["string", "number"]}, 3),
        ("3.5", {"type": ["string", "integer"]}, "3.5"),
        ("[1]", {"oneOf": [{"type": "array"}, {"type": "string"}]}, [1]),
        ("5", {"anyOf": [{"type": "string"}, {"$ref": "#/x"}]}, 5),
        ("7", {"enum": ["7", "8"]}, "7"),
        ("7", {"enum": [7, 8]}, 7),
        ("null", {"enum": [None, True, 1.5, [], {}]}, None),
        # Quotation marks stay only where a string may stand, as bare strings have none.
        ('"x"', {"type": "string"}, '"x"'),
        ('"5"', {"type": ["string", "integer"]}, '"5"'),
        ('"null"', {"type": ["string", "null"]}, '"null"'),
        ('"x"', {}, "x"),
        ('"5"', {}, "5"),
        ('"42"', {"type": "number"}, 42),
        (' "4.5"\n', {"type": "number"}, 4.5),
        ('"42"', {"type": "integer"}, 42),
        ('"4.5"', {"type": "integer"}, "4.5"),
        ('"4.0"', {"type": "integer"}, 4.0),
        ('"true"', {"type": "boolean"}, True),
        ('"False"', {"type": "boolean"}, False),
        ('"null"', {"type": ["integer", "null"]}, None),
        ('"[1]"', {"type": "array"}, [1]),
        ('"{\\"a\\": 1}"', {"type": "object"}, {"a": 1}),
        ('"forty"', {"type": "number"}, "forty"),
        ('"5"', {"type": "object"}, "5"),
        ("7", True, 7),
        (" 7\n", None, 7),
        ("", {"type": "integer"}, ""),
        ("NaN", {"type": "number"}, "NaN"),
        ("1e999", {"type": "number"}, "1e999"),
        ('["\\ud800"]', {"type": "array"}, '["\\ud800"]'),
        ("9" * 5000, {"type": "integer"}, "9" * 5000),
        ("[" * 100_000, {"type": "array"}, "[" * 100_000),
        ("[" * 100_000 + "]" * 100_000, {"type": "array"}, "[" * 100_000 + "]" * 100_000),
    ],
    ids=lambda part: repr(part)[:40],
)
def test_argument_types(text: str, schema: Any, value: Any) -> None:
    """A string taken for another type, or a value that JSON or UTF-8 cannot hold."""
    types = ArgumentTypes({"properties": {"x": schema}}).of("x")
    found, encoded = decode_argument(text, types)
    assert found == value
    assert type(found) is type(value)
    assert json.loads(encoded.encode()) == value


OPTIONAL = frozenset({"string", "null"})
OR_NUMBER = frozenset({"string", "integer", "number"})
OR_LIST = frozenset({"string", "array"})


@pytest.mark.parametrize(
    ("start", "types", "known"),
    [
        ("", STRING, True),
        ("nu", STRING, True),
        ("", OPTIONAL, None),
        (" \n", OPTIONAL, None),
        ("O", OPTIONAL, True),
        ("2", OPTIONAL, True),
        ("t", OPTIONAL, True),
        ("{", OPTIONAL, True),
        ('"', OPTIONAL, True),
        (" nul", OPTIONAL, None),
        ("null ", OPTIONAL, None),
        ("null a", OPTIONAL, True),
        ("nul ", OPTIONAL, True),
        ("nulla", OPTIONAL, True),
        ("None", OPTIONAL, None),
        ("Not", OPTIONAL, True),
        ("-", OR_NUMBER, None),
        ("- ", OR_NUMBER, True),
        ("-I", OR_NUMBER, True),
        ("12", OR_NUMBER, None),
        ("12\n", OR_NUMBER, None),
        ("12 a", OR_NUMBER, True),
        ("1.", OR_NUMBER, None),
        ("1. ", OR_NUMBER, True),
        ("1.5e+", OR_NUMBER, None),
        ("1.e", OR_NUMBER, True),
        ("01", OR_NUMBER, True),
        ("2024-", OR_NUMBER, True),
        ("null", OR_NUMBER, True),
        ("[", OR_NUMBER, True),
        ("[", OR_LIST, False),
        ("{", OR_LIST, True),
        ("tru", ANY, None),
        ("true", ANY, None),
        ("trust", ANY, True),
        ("\u00a0Fals", ANY, None),
        ("1", ANY, None),
        ("a", ANY, True),
        (' "', ANY, False),
        ("{", ANY, False),
        ("", frozenset({"null"}), False),
        ("a", frozenset({"null"}), False),
        # What stays open for long is held to its end, so that it is not looked at for ever.
        ("1" * 99, ANY, None),
        ("1" * 100, ANY, False),
        (" " * 200 + "a", OPTIONAL, False),
        (" " * 99 + "a", OPTIONAL, True),
    ],
    ids=lambda part: repr(sorted(part) if isinstance(part, frozenset) else part)[:40],
)
def test_start_of_a_string(start: str, types: Types, known: bool | None) -> None:
    """A string that is held back, or streamed before it is known to be one."""
    assert starts_string(start, types) is known


VALUES = st.lists(
    st.sampled_from(
        [*'01 \n-+.eE"{}[]', "\u00a0", "null", "None", "true", "False", "nu", "NaN", "-Infinity"]
    )
    | st.text(max_size=3)
    | st.recursive(
        st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=3),
        lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=2), inner),
        max_leaves=3,
    ).map(json.dumps),
    max_size=5,
).map("".join)
TYPES = st.sampled_from([STRING, OPTIONAL, OR_NUMBER, OR_LIST, ANY]) | st.frozensets(
    st.sampled_from(sorted(ANY)), min_size=1
)


@given(text=VALUES | st.from_regex(r"[ \n]{0,120}-?[0-9]{0,120}", fullmatch=True), types=TYPES)
def test_what_starts_a_string_is_one(text: str, types: Types) -> None:
    """A streamed start that turns out to be of another type, or an answer that changes."""
    answers = [starts_string(text[:end], types) for end in range(len(text) + 1)]
    known = [answer for answer in answers if answer is not None]
    assert answers == [None] * (len(answers) - len(known)) + known
    assert len(set(known)) <= 1
    if True in known:
        assert decode_argument(text, types) == (text, json.dumps(text, ensure_ascii=False))


COLOR = {"type": "string", "enum": ["1", "2"]}
TREE = {"anyOf": [{"type": "string"}, {"$ref": "#/$defs/Tree"}]}
NUMBER = frozenset({"number", "integer"})
# Each refers to the next in two ways, so that there are 2**100 ways through.
MANY = {
    str(place): {
        "anyOf": [{"$ref": f"#/$defs/{place + 1}"}],
        "allOf": [{"$ref": f"#/$defs/{place + 1}"}],
    }
    for place in range(100)
}


@pytest.mark.parametrize(
    ("parameters", "types"),
    [
        ({"properties": {"x": {"$ref": "#/$defs/Color"}}, "$defs": {"Color": COLOR}}, STRING),
        (
            {
                "properties": {"x": {"$ref": "#/definitions/a~1b%20c~0"}},
                "definitions": {"a/b c~": COLOR},
            },
            STRING,
        ),
        ({"properties": {"x": {"$ref": "#/y/anyOf/1"}}, "y": {"anyOf": [1, COLOR]}}, STRING),
        ({"properties": {"x": {"$ref": "#"}}, "type": "object"}, {"object"}),
        ({"$ref": "#/$defs/P", "$defs": {"P": {"properties": {"x": COLOR}}}}, STRING),
        ({"allOf": [{"properties": {"x": {"type": "number"}}}, {"type": "object"}]}, NUMBER),
        ({"oneOf": [{"properties": {"y": {}}}, {"properties": {"x": COLOR}}]}, STRING),
        ({"anyOf": [{"properties": {"x": {}}}, {"properties": {"x": COLOR}}]}, ANY),
        ({"properties": {"x": {"anyOf": [{"const": str(n)} for n in range(2000)]}}}, STRING),
        (
            {"anyOf": [{"properties": {"x": {"type": "null"}}}, {"properties": {"x": COLOR}}]},
            {"null", "string"},
        ),
        ({"properties": {"y": {"type": "null"}}, "additionalProperties": COLOR}, STRING),
        ({"patternProperties": {"y": {"type": "null"}}, "additionalProperties": COLOR}, ANY),
        ({"properties": {"x": {"anyOf": [COLOR, {"type": "null"}]}}}, {"string", "null"}),
        ({"properties": {"x": {"oneOf": [{"const": "1"}, {"enum": ["2"]}]}}}, STRING),
        ({"properties": {"x": {"anyOf": [COLOR, {}]}}}, ANY),
        ({"properties": {"x": {"allOf": [{"type": ["string", "null"]}, COLOR]}}}, STRING),
        ({"properties": {"x": {"allOf": [{"type": "number"}, {"type": "integer"}]}}}, {"integer"}),
        ({"properties": {"x": {"const": 1.5}}}, NUMBER),
        ({"properties": {"x": {"type": ["string", "null"], "enum": ["a"]}}}, STRING),
        # Of a cycle, what is beside it counts.
        ({"properties": {"x": {"$ref": "#/$defs/Tree"}}, "$defs": {"Tree": TREE}}, STRING),
        ({"properties": {"x": {"$ref": "#/properties/x"}}}, ANY),
        ({"$ref": "#", "properties": {"x": COLOR}}, STRING),
        ({"$ref": "#"}, ANY),
        # What cannot be followed or read says nothing.
        ({"properties": {"x": {"$ref": "#/$defs/0"}}, "$defs": MANY}, ANY),
        ({"properties": {"x": {"$ref": "#/$defs/Color"}}}, ANY),
        ({"properties": {"x": {"$ref": "#/properties/x/enum/9", "enum": [1]}}}, {"integer"}),
        ({"properties": {"x": {"$ref": "other.json#/x"}}}, ANY),
        ({"properties": {"x": {"$ref": "#Color"}}}, ANY),
        ({"properties": {"x": {"$ref": ["#"]}}}, ANY),
        ({"properties": {"x": {"type": "str"}}}, ANY),
        ({"properties": {"x": {"type": {"a": 1}, "anyOf": 1, "enum": "a"}}}, ANY),
        ({"properties": {"x": {"type": "string", "const": 1}}}, ANY),
        ({"properties": []}, ANY),
        ([1], ANY),
        (None, ANY),
    ],
    # Sorted: the processes that share the tests must give them the same names.
    ids=lambda part: repr(sorted(part) if isinstance(part, frozenset | set) else part)[:60],
)
def test_types_of_an_argument(parameters: Any, types: Any) -> None:
    """A type behind an indirection that is not found, or a schema that breaks the parser."""
    assert ArgumentTypes(parameters).of("x") == types


def test_schemas_within_schemas_without_end() -> None:
    """Recursion that ends the parse of an output."""
    deep = functools.reduce(lambda inner, _: {"allOf": [inner]}, range(5000), COLOR)
    assert ArgumentTypes({"properties": {"x": deep}}).of("x") == ANY


SCHEMAS = st.recursive(
    st.sampled_from([True, None, 5, {}, COLOR, {"type": "null"}, {"$ref": "#"}, {"$ref": "#/a"}]),
    lambda inner: (
        st.dictionaries(
            st.sampled_from(["properties", "x", "a", "$ref", "type", "enum", "allOf"]), inner
        )
        | st.dictionaries(st.sampled_from(["allOf", "anyOf", "oneOf"]), st.lists(inner, max_size=3))
    ),
    max_leaves=12,
)


@given(schema=SCHEMAS)
def test_any_schema_has_types(schema: Any) -> None:
    """A schema that breaks the parser, or leaves an argument without a type to be read by."""
    types = ArgumentTypes(schema).of("x")
    assert types
    assert types <= ANY
