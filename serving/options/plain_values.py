"""Python's own numbers and lists, in place of those of numpy and jax."""

from collections.abc import Mapping
from typing import Any


def plain_value(value: Any) -> Any:
    """A value with Python's numbers for scalars of numpy or jax, and lists for arrays.

    Lists, tuples and mappings are copied, their entries treated alike. All else is returned as it
    is.
    """
    if isinstance(value, Mapping):
        return {plain_value(key): plain_value(entry) for key, entry in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(plain_value, value))
    # A class of numbers has the method too.
    is_number = hasattr(value, "tolist") and not isinstance(value, type)
    return value.tolist() if is_number else value
