"""Wording of the code, as far as a test can check it."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FOLDERS = ("benchmarks", "glm53", "kvcache", "pallas_kernels", "scripts", "serving")


@pytest.mark.parametrize("folder", FOLDERS)
def test_module_docstrings(folder: str) -> None:
    """A docstring of a module that begins with a question instead of naming the thing."""
    paths = sorted((ROOT / folder).rglob("*.py"))
    assert paths, f"no modules in {folder}"
    for path in paths:
        docstring = ast.get_docstring(ast.parse(path.read_text())) or ""
        begins = re.match(r"(What|Which|How|Every)\b", docstring)
        assert not begins, f"{path.relative_to(ROOT)}: {docstring.splitlines()[0]}"
