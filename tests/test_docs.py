"""What the documentation shows is run, and what it links to is there."""

import re
from pathlib import Path

import pytest

from tests.helpers.session import GOLDEN

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCKS = [
    pytest.param(block, id=f"{page.name}-{number}")
    for page in PAGES
    for number, block in enumerate(re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL))
]


@pytest.mark.compiles
@pytest.mark.usefixtures("as_a_user")
@pytest.mark.parametrize("block", BLOCKS)
def test_example(
    block: str, tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A page's Python example runs, and prints what a comment behind a `print` promises."""
    monkeypatch.chdir(tmp_path)
    # README.md has the sizes of an engine that is given none. Others take those of `tiny_llm`,
    # whose compiled steps are found in the cache.
    sizes = "max_model_len=512, max_num_seqs=4, max_num_batched_tokens=64"
    block = block.replace("LLM()", f"LLM({sizes})")
    block = block.replace("path/to/checkpoint", str(GOLDEN / "tiny_fp8"))
    block = block.replace("path/to/new-directory", str(tmp_path / "new"))
    exec(compile(block, "example", "exec"), {})
    printed = capsys.readouterr().out
    for promised in re.findall(r"^print\(.*\)  # (.*)$", block, re.MULTILINE):
        assert promised in printed


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_paths(page: Path) -> None:
    """Links between pages, and files named in the text, exist."""
    text = page.read_text()
    for target in re.findall(r"\]\(([^)#:]+)\)", text):
        assert (page.parent / target).exists(), target
    for target in re.findall(r"`((?:glm53|kvcache|pallas_kernels|serving|tests)/[\w/.]*)`", text):
        assert (ROOT / target).exists(), target
