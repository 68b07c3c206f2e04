"""JSON that has one meaning: no repeated keys, no infinities, no halves of characters."""

import collections
import json
import math
from typing import Any

MAX_DEPTH = 128
"""Most objects and lists within each other."""

_MAX_DIGITS = 308  # Of an integer: what a double can hold.


def read_json(data: bytes | str) -> tuple[Any, str | None]:
    """Reads a JSON text.

    Args:
        data: the text, in UTF-8 if it is bytes.

    Returns:
        The value, and what is wrong with it or None. A value with a fault is what can be made of
        it, to find out whose it is; it is None where nothing can.
    """
    faults: list[str] = []

    def read_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            key, count = collections.Counter(key for key, _ in pairs).most_common(1)[0]
            times = "twice" if count == 2 else f"{count} times"
            faults.append(f"key {key!r} appears {times} in one object")
        return found

    def read_int(text: str) -> int:
        if len(text.lstrip("-")) > _MAX_DIGITS:
            faults.append(f"an integer has more than {_MAX_DIGITS} digits")
            return 0
        return int(text)

    def read_float(text: str) -> float:
        value = float(text)
        if math.isinf(value):
            faults.append(f"a number is out of range: {text[:40]}")
        return value

    def read_constant(name: str) -> None:
        faults.append(f"{name} is not valid JSON")

    try:
        value = json.loads(
            data if isinstance(data, str) else data.decode(),
            object_pairs_hook=read_object,
            parse_int=read_int,
            parse_float=read_float,
            parse_constant=read_constant,
        )
    except UnicodeDecodeError as error:
        return None, f"not UTF-8: {error.reason} at byte {error.start}"
    except RecursionError:
        return None, f"nested more than {MAX_DEPTH} deep"
    except ValueError as error:
        return None, f"not JSON: {error}"
    fault = _fault_within(value)
    return value, faults[0] if faults else fault


def _fault_within(value: Any) -> str | None:
    """Nesting that later steps could not follow, or text that cannot be encoded."""
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        inner: list[Any] = []
        for item in level:
            if isinstance(item, dict):
                inner += item
                inner += item.values()
            elif isinstance(item, list):
                inner += item
            elif isinstance(item, str) and not is_unicode(item):
                return "a text holds half a surrogate pair, which is no character"
        if not inner:
            return None
        level = inner
    return f"nested more than {MAX_DEPTH} deep"


def is_unicode(text: str) -> bool:
    """Whether a text can be encoded: it has no lone surrogate."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
