"""JSON types of a tool's arguments, as its JSON schema has them, and arguments of those types.

Only one question is asked of a schema: of which types may this argument be? It follows local
references (`#` and JSON pointers), `allOf`, `anyOf`, `oneOf`, `const`, `enum` and
`additionalProperties`, and their cycles. Libraries for JSON schema answer another question, whether
a value is valid, and the type must be known before the value has ended, so that a string can be
streamed.

No schema is refused: the model has read it as it stands. What is malformed, contradicts itself,
refers to nothing or to another document, or uses further keywords (`$anchor`, `if`,
`patternProperties`) says nothing about the type.
"""

import json
import re
import urllib.parse
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

Types = frozenset[str]
"""Names of JSON types; "number" comes with "integer"."""

ANY: Types = frozenset({"null", "boolean", "integer", "number", "string", "array", "object"})
"""Types of an argument of which the schema says nothing."""

STRING: Types = frozenset({"string"})

_CYCLE: Types = frozenset()
_PYTHON_WORDS = {"True": True, "False": False, "None": None}
_MAX_VISITS = 5_000  # Schemas looked at for one argument: references can multiply without end.

_WORDS = {"null": ("null", "None"), "boolean": ("true", "false", "True", "False")}
_NUMBER_START = re.compile(
    r"-?(?:(?:0|[1-9][0-9]*)(?:\.[0-9]*)?(?:(?<=[0-9])[eE][+-]?[0-9]*)?(?:(?<=[0-9])[ \t\n\r]+)?)?"
)
_MAX_UNDECIDED = 100  # Characters of an argument that can leave open whether it is a string.


class ArgumentTypes:
    """Types of the arguments of one tool."""

    def __init__(self, parameters: Any) -> None:
        """Takes the schema of the arguments' object; anything but an object says nothing."""
        self._root = parameters
        self._known: dict[str, Types] = {}
        self._num_visits = 0

    def of(self, name: str) -> Types:
        """Returns the types of an argument."""
        if name not in self._known:
            self._num_visits = 0
            try:
                found = self._of_argument(self._root, name, frozenset())
                self._known[name] = found or ANY
            except RecursionError:  # Thousands of schemas within each other.
                self._known[name] = ANY
        return self._known[name]

    def _of_argument(self, schema: Any, name: str, references: frozenset[str]) -> Types | None:
        """Returns what an object's schema says of an argument, None if it has no such argument.

        Args:
            schema: The schema.
            name: The argument's name.
            references: References that led here; one of them again is a cycle.
        """
        if not self._may_visit(schema):
            return None
        said: list[Types | None] = []
        properties, others = schema.get("properties"), schema.get("additionalProperties")
        if isinstance(properties, Mapping) and name in properties:
            said.append(self._of(properties[name], frozenset()))
        elif isinstance(others, Mapping) and "patternProperties" not in schema:
            said.append(self._of(others, frozenset()))
        if "$ref" in schema:
            reference = str(schema["$ref"])
            if reference in references:
                return _CYCLE
            target = self._target(reference)
            said.append(self._of_argument(target, name, references | {reference}))
        said += [self._of_argument(part, name, references) for part in _parts(schema, "allOf")]
        for keyword in ("anyOf", "oneOf"):
            alternatives = _parts(schema, keyword)
            found = [self._of_argument(part, name, references) for part in alternatives]
            # Of alternatives, those count that have such an argument.
            having = [types for types in found if types is not None]
            said.append(frozenset().union(*having) if having else None)
        known = [types for types in said if types is not None]
        return _all_of(known) if known else None

    def _of(self, schema: Any, references: frozenset[str]) -> Types:
        """Returns the types that a value's schema allows; see `_of_argument`."""
        if not self._may_visit(schema):
            return ANY
        said = [_declared(schema)]
        if "$ref" in schema:
            reference = str(schema["$ref"])
            if reference in references:
                return _CYCLE
            said.append(self._of(self._target(reference), references | {reference}))
        said += [self._of(part, references) for part in _parts(schema, "allOf")]
        for keyword in ("anyOf", "oneOf"):
            found = [self._of(part, references) for part in _parts(schema, keyword)]
            said.append(frozenset().union(*found))
        return _all_of(said)

    def _may_visit(self, schema: Any) -> bool:
        self._num_visits += 1
        return isinstance(schema, Mapping) and self._num_visits <= _MAX_VISITS

    def _target(self, reference: str) -> Any:
        """Returns the schema that a reference means, None if there is none here."""
        path, _, pointer = reference.partition("#")
        if path or (pointer and not pointer.startswith("/")):
            return None
        target = self._root
        for step in urllib.parse.unquote(pointer).split("/")[1:]:
            step = step.replace("~1", "/").replace("~0", "~")
            if isinstance(target, Mapping):
                target = target.get(step)
            elif isinstance(target, list) and re.fullmatch("[0-9]{1,9}", step):
                target = next(iter(target[int(step) :]), None)
            else:
                return None
        return target


def _parts(schema: Mapping[str, Any], keyword: str) -> list[Any]:
    """Returns the schemas that a keyword lists."""
    parts = schema.get(keyword)
    return parts if isinstance(parts, list) else []


def _all_of(said: Iterable[Types]) -> Types:
    """Returns the types that everything said allows; what only leads back here says nothing."""
    return ANY.intersection(*(types for types in said if types))


def _declared(schema: Mapping[str, Any]) -> Types:
    """Returns the types that a schema's own keywords allow."""
    said = []
    declared = schema.get("type")
    names = declared if isinstance(declared, list) else [declared]
    if all(isinstance(name, str) and name in ANY for name in names):
        said.append(frozenset(names))
    if isinstance(schema.get("enum"), list):
        said.append(frozenset(map(_json_type, schema["enum"])))
    if "const" in schema:
        said.append(frozenset({_json_type(schema["const"])}))
    return _all_of(types | {"integer"} if "number" in types else types for types in said)


def decode_argument(text: str, types: Types) -> tuple[Any, str]:
    """Returns the value of an argument as the model wrote it, and that value as JSON.

    The chat template writes strings bare and all other values as JSON. So the text is the value
    where the schema allows only strings. Elsewhere it is read as JSON, in which `True`, `False` and
    `None` count as well:
    * A value that is no string is taken; where strings are allowed too, only if its type is.
    * A string in quotation marks is taken without them where the schema says nothing or allows no
      strings. There, if what it holds is JSON of an allowed type, it is that: `"42"` is a number.
    All else is a string, verbatim.

    Args:
        text: What stands between the value's tags.
        types: The argument's types.
    """
    value = text if types == STRING else _read(text)
    if isinstance(value, str):
        value = _unquoted(text, types)
    elif "string" in types and not _fits(value, types):
        value = text
    encoded = _encode(value)
    if encoded is None:
        return text, json.dumps(text, ensure_ascii=False)
    return value, encoded


def starts_string(start: str, types: Types) -> bool | None:
    """Returns whether an argument is known to be a string, verbatim, from its start.

    So a string can be streamed. True means that `decode_argument` takes any text that begins with
    `start` for a string, as it stands. The answer for a start is also that for all longer ones,
    unless it is None.

    Args:
        start: The start of what stands between the value's tags.
        types: The argument's types.

    Returns:
        True if it is a string whatever follows, False if only its end tells, and None if the next
        characters may tell.
    """
    if types == STRING:
        return True
    if "string" not in types:
        return False
    seen = start[:_MAX_UNDECIDED].lstrip()
    if seen.startswith(tuple(_openers(types))):
        return False
    words = [word for name, words in _WORDS.items() if name in types for word in words]
    if (
        not seen
        or ({"integer", "number"} & types and _NUMBER_START.fullmatch(seen))
        or any(word.startswith(seen) or word == seen.rstrip() for word in words)
    ):
        return None if len(start) < _MAX_UNDECIDED else False
    return True


def _openers(types: Types) -> Iterator[str]:
    """Yields the characters that begin a value of which only the end tells whether it is JSON."""
    if "object" in types:
        yield "{"
    if "array" in types:
        yield "["
    if types == ANY:
        yield '"'


def _read(text: str) -> Any:
    """Returns the JSON value that a text is, or the text."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return _PYTHON_WORDS.get(text.strip(), text)


def _unquoted(text: str, types: Types) -> Any:
    """Returns what stands in quotation marks where no string may stand, else the text."""
    if "string" in types and types != ANY:
        return text
    held = _read(text)
    value = _read(held)
    fits = "string" not in types and _fits(value, types) and _encode(value) is not None
    return value if fits else held


def _encode(value: Any) -> str | None:
    """Returns a value as JSON, None if it is something that Python reads and JSON does not have:
    an infinity, or half a character."""
    try:
        encoded = json.dumps(value, ensure_ascii=False, allow_nan=False)
        encoded.encode()
    except (ValueError, RecursionError):
        return None
    return encoded


def _fits(value: Any, types: Types) -> bool:
    """Returns whether a value is of one of some types."""
    if isinstance(value, float) and value.is_integer() and "integer" in types:
        return True
    return _json_type(value) in types


def _json_type(value: Any) -> str:
    """Returns the name that JSON schema has for the type of a decoded JSON value."""
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int():
            return "integer"
        case float():
            return "number"
        case str():
            return "string"
        case list():
            return "array"
        case _:
            return "object"
