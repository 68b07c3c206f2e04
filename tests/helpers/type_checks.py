"""Run-time checks of annotations, cheap enough for every call of every test.

`--jaxtyping-packages` decorates every function of the packages with `jaxtyping.jaxtyped`, which
binds the names of axes over a call: six microseconds, most of what a long history of page moves
takes. Functions without arrays have no axes; beartype alone checks them in a twentieth of that.
"""

import dataclasses
import functools
import inspect
import io
from collections.abc import Callable
from typing import Any, BinaryIO, get_args

import jaxtyping
from beartype import BeartypeConf, FrozenDict, beartype

_jaxtyped = jaxtyping.jaxtyped
# An int is a float, and a file in memory is a BinaryIO, as type checkers have it.
_beartype = beartype(
    conf=BeartypeConf(
        violation_type=jaxtyping.TypeCheckError,
        is_pep484_tower=True,
        hint_overrides=FrozenDict({BinaryIO: BinaryIO | io.BytesIO}),
    )
)


def check_cheaply() -> None:
    """Has the import hook decorate what takes no arrays with beartype alone.

    Packages that are imported before keep the decorators that they have.
    """
    jaxtyping.jaxtyped = _checked


def _checked(*, typechecker: Callable) -> Callable:
    """Stands for `jaxtyping.jaxtyped` in what the import hook writes above each definition."""
    return functools.partial(_check, _jaxtyped(typechecker=typechecker))


def _check(jaxtyped: Callable, definition: Any) -> Any:
    """Decorates a function, a method of any kind, or the `__init__` of a dataclass."""
    if isinstance(definition, type):
        if dataclasses.is_dataclass(definition) and "__init__" in vars(definition):
            definition.__init__ = _check(jaxtyped, definition.__init__)
        return definition
    if isinstance(definition, classmethod | staticmethod):
        return type(definition)(_check(jaxtyped, definition.__func__))
    if isinstance(definition, property):
        accessors = (definition.fget, definition.fset, definition.fdel)
        return property(*(accessor and _check(jaxtyped, accessor) for accessor in accessors))
    hints = inspect.get_annotations(definition).values()
    # A quoted name may be one that only type checkers know, which beartype refuses.
    if any(isinstance(hint, str) or _has_arrays(hint) for hint in hints):
        return jaxtyped(definition)

    @functools.cache
    def checked() -> Callable:
        return _beartype(definition)

    @functools.wraps(definition)
    def either(*args: Any, **kwargs: Any) -> Any:
        function = definition if jaxtyping.config.jaxtyping_disable else checked()
        return function(*args, **kwargs)

    return either


def _has_arrays(hint: Any) -> bool:
    """Returns whether an annotation names axes of arrays, anywhere inside."""
    if isinstance(hint, list):  # the arguments of a Callable
        return any(map(_has_arrays, hint))
    return type(hint).__module__.startswith("jaxtyping.") or any(map(_has_arrays, get_args(hint)))
