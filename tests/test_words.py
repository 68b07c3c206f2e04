"""Wording of the code, as far as a test can check it."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FOLDERS = ("benchmarks", "glm53", "kvcache", "pallas_kernels", "scripts", "serving")
QUESTION = re.compile(r"(What|Which|How|Every)\b")


def docstrings(tree: ast.Module) -> Iterator[ast.Constant]:
    """Strings that stand alone: docstrings of modules, definitions and constants."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            yield node.value


@pytest.mark.parametrize("folder", FOLDERS)
def test_docstrings(folder: str) -> None:
    """A docstring that begins with a question instead of naming the thing."""
    paths = sorted((ROOT / folder).rglob("*.py"))
    assert paths, f"no modules in {folder}"
    for path in paths:
        found = [text for text in docstrings(ast.parse(path.read_text())) if text.value is not ...]
        assert found, f"{path.relative_to(ROOT)} has no docstring"
        for text in found:
            first = str(text.value).splitlines()[0]
            assert not QUESTION.match(first), f"{path.relative_to(ROOT)}:{text.lineno}: {first}"


def test_module_docstrings_of_tests() -> None:
    """A file of tests whose docstring begins with a question; those of tests name failures."""
    paths = sorted((ROOT / "tests").rglob("*.py"))
    assert paths, "no tests"
    for path in paths:
        docstring = ast.get_docstring(ast.parse(path.read_text())) or ""
        assert not QUESTION.match(docstring), f"{path.relative_to(ROOT)}: {docstring}"
