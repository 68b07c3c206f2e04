"""Frozen dataclasses that are pytrees."""

import dataclasses
from typing import Any, dataclass_transform

import jax


@dataclass_transform(frozen_default=True)
def pytree_dataclass[Class](cls: type[Class]) -> type[Class]:
    """Makes a class a frozen dataclass and a pytree of its fields.

    Unlike `jax.tree_util.register_dataclass`, rebuilding one does not call `__init__`: the same
    structure may hold shapes, shardings or specs, which its field types do not admit.
    """
    frozen: Any = dataclasses.dataclass(frozen=True)(cls)
    names = [field.name for field in dataclasses.fields(frozen)]

    def flatten(tree: Any) -> tuple[list[tuple[Any, Any]], None]:
        keys = [jax.tree_util.GetAttrKey(name) for name in names]
        return [(key, getattr(tree, key.name)) for key in keys], None

    def unflatten(_: None, leaves: Any) -> Any:
        return make_unchecked(frozen, **dict(zip(names, leaves, strict=True)))

    jax.tree_util.register_pytree_with_keys(frozen, flatten, unflatten)
    return frozen


def make_unchecked[Class](cls: type[Class], **fields: object) -> Class:
    """An instance that holds other things than arrays, such as specs."""
    tree = object.__new__(cls)
    for name, value in fields.items():
        object.__setattr__(tree, name, value)
    return tree
