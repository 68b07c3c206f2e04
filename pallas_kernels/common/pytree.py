"""Frozen dataclasses that are pytrees."""

import dataclasses
from typing import Any, dataclass_transform

import jax

_STATIC = "static"


def static(**options: Any) -> Any:
    """A field of a `pytree_dataclass` that is compared, and is no array.

    Args:
        options: for `dataclasses.field`.
    """
    return dataclasses.field(metadata={_STATIC: True}, **options)


@dataclass_transform(frozen_default=True, field_specifiers=(static,))
def pytree_dataclass[Class](cls: type[Class]) -> type[Class]:
    """Makes a class a frozen dataclass and a pytree of its fields.

    Unlike `jax.tree_util.register_dataclass`, rebuilding one does not call `__init__`: the same
    structure may hold shapes, shardings or specs, which its field types do not admit.

    Fields that are `static()` are part of the structure.
    """
    frozen: Any = dataclasses.dataclass(frozen=True)(cls)
    fields = dataclasses.fields(frozen)
    names = [field.name for field in fields if not field.metadata.get(_STATIC)]
    static_names = [field.name for field in fields if field.metadata.get(_STATIC)]

    def flatten(tree: Any) -> tuple[list[tuple[Any, Any]], tuple[Any, ...]]:
        keys = [jax.tree_util.GetAttrKey(name) for name in names]
        structure = tuple(getattr(tree, name) for name in static_names)
        return [(key, getattr(tree, key.name)) for key in keys], structure

    def unflatten(structure: tuple[Any, ...], leaves: Any) -> Any:
        values = zip(names + static_names, (*leaves, *structure), strict=True)
        return make_unchecked(frozen, **dict(values))

    jax.tree_util.register_pytree_with_keys(frozen, flatten, unflatten)
    return frozen


def make_unchecked[Class](cls: type[Class], **fields: object) -> Class:
    """An instance that holds other things than arrays, such as specs."""
    tree = object.__new__(cls)
    for name, value in fields.items():
        object.__setattr__(tree, name, value)
    return tree
