"""Run-time checks of annotations, as every test has them."""

import dataclasses
import importlib
import inspect
from collections.abc import Callable
from typing import Any

import beartype
import jaxtyping
import numpy as np
import pytest
from jaxtyping import Float

from tests.test_project import PACKAGES, ROOT, modules

# What the import hook writes above each definition of the packages.
checked = jaxtyping.jaxtyped(typechecker=beartype.beartype)


@checked
def without_arrays(count: int) -> str:
    return "many" if count > 1 else count  # pyright: ignore[reportReturnType]


@checked
def with_arrays(
    left: Float[np.ndarray, "rows width"], right: Float[np.ndarray, " width"]
) -> Float[np.ndarray, " rows"]:
    return left @ right if right.any() else right


@checked
@dataclasses.dataclass
class Fields:
    count: int
    rows: Float[np.ndarray, " count"] | None = None

    @property
    @checked
    def text(self) -> str:
        return self.count  # pyright: ignore[reportReturnType]

    @classmethod
    @checked
    def of(cls, text: str) -> "Fields":
        return cls(len(text))

    @staticmethod
    @checked
    def double(count: int) -> int:
        return 2 * count


WRONG: list[Callable[[], Any]] = [
    lambda: without_arrays("two"),  # pyright: ignore[reportArgumentType]
    lambda: without_arrays(1),
    lambda: with_arrays(np.ones((3, 2)), np.ones(3)),
    lambda: with_arrays(np.ones((3, 2)), np.zeros(2)),
    lambda: with_arrays(np.ones((3, 2), int), np.ones(2)),
    lambda: Fields("two"),  # pyright: ignore[reportArgumentType]
    lambda: Fields(2, np.ones((2, 2))),
    lambda: Fields(2).text,
    lambda: Fields.of(2),  # pyright: ignore[reportArgumentType]
    lambda: Fields.double("two"),  # pyright: ignore[reportArgumentType]
]


@pytest.mark.parametrize("call", WRONG)
def test_wrong_types(call: Callable[[], Any]) -> None:
    """A kind of definition, or of annotation, that goes unchecked."""
    with pytest.raises(jaxtyping.TypeCheckError):
        call()


@pytest.mark.usefixtures("as_a_user")
def test_as_a_user() -> None:
    """A check that stays where a test is about what users get for wrong types."""
    assert without_arrays(1) == 1
    assert Fields("two").text == "two"  # pyright: ignore[reportArgumentType]


def test_right_types() -> None:
    """A call that is refused although a type checker takes it."""
    assert without_arrays(2) == "many"
    assert with_arrays(np.ones((3, 2)), np.ones(2)).tolist() == [2, 2, 2]
    assert Fields.of("abc").count == 3
    assert Fields.double(2) == 4


@pytest.mark.parametrize("package", [*PACKAGES, "scripts"])
def test_every_module_is_checked(package: str) -> None:
    """A module that is imported before the checks are in place, or a package that is left out."""
    for file in modules(package):
        name = ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        if name.endswith("__main__"):
            continue
        functions = [
            function
            for function in vars(importlib.import_module(name)).values()
            if inspect.isfunction(function) and function.__module__ == name
        ]
        unchecked = [one.__name__ for one in functions if not hasattr(one, "__wrapped__")]
        assert not unchecked, f"{name} has {unchecked}"


def test_no_file_goes_unchecked() -> None:
    """A file of tests that turns the checks off for all of them."""
    for file in sorted((ROOT / "tests").rglob("test_*.py")):
        for line in file.read_text().splitlines():
            assert not (line.startswith("pytestmark") and "as_a_user" in line), file
            assert "jaxtyping_" + "disable" not in line, file
