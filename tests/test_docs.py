"""Tests of the documentation: examples run, commands exist, tables and pictures match the code."""

import argparse
import ast
import dataclasses
import importlib
import json
import re
import shlex
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvcache import CacheCounters
from scripts.aot.aot import CompileReport
from serving.cli.command_line import parse
from serving.engine.metrics import LoopMetrics
from serving.openai_protocol import ROUTES
from serving.options.engine_options import EngineOptions
from serving.requests.sampling_params import SamplingParams
from tests.helpers.golden import GOLDEN

ROOT = Path(__file__).parent.parent
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    *sorted((ROOT / "docs").glob("*.md")),
]
PACKAGES = ("serving", "glm53", "kvcache", "pallas_kernels")
MAKEFILE = (ROOT / "Makefile").read_text()
SOURCES = [
    path
    for folder in (*PACKAGES, "benchmarks", "scripts", "tests")
    for path in (ROOT / folder).rglob("*.py")
]
WORDS = set(re.findall(r"\w+", " ".join(path.read_text() for path in SOURCES)))


def blocks(page: Path, language: str) -> list[str]:
    """The fenced blocks of a page in a language; "" is none."""
    fences = re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE)
    return [block for found, block in fences if found == language]


def prose(page: Path) -> str:
    """A page without its fenced blocks."""
    return re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)


def spans(text: str) -> list[str]:
    """What stands in backticks."""
    return [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", text)]


EXAMPLES = [
    pytest.param(block, id=f"{page.name}-{number}")
    for page in PAGES
    for number, block in enumerate(blocks(page, "python"))
]


@pytest.mark.compiles
@pytest.mark.usefixtures("as_a_user")
@pytest.mark.parametrize("block", EXAMPLES)
def test_example(
    block: str, tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A Python example that fails, or does not print what a comment behind a `print` says."""
    monkeypatch.chdir(tmp_path)
    # README.md has the sizes of an engine that is given none. Others take those of `tiny_llm`,
    # whose compiled steps are found in the cache.
    sizes = "max_model_len=512, max_num_seqs=4, max_num_batched_tokens=64"
    block = block.replace("LLM()", f"LLM({sizes})")
    block = block.replace("path/to/checkpoint", str(GOLDEN / "tiny_fp8"))
    block = block.replace("path/to/new-directory", str(tmp_path / "new"))
    exec(compile(block, "example", "exec"), {})
    printed = capsys.readouterr().out
    for expected in re.findall(r"^print\(.*\)  # (.*)$", block, re.MULTILINE):
        assert expected in printed


def test_json_examples() -> None:
    """An example of JSON that is none, or a request that its route refuses."""
    lines = [
        json.loads(line)
        for page in PAGES
        for text in blocks(page, "json")
        for line in text.splitlines()
    ]
    requests = [line for line in lines if "url" in line]
    assert requests
    for request in requests:
        ROUTES[request["url"]](request["body"], ["tiny"])


def test_session_of_compile_report() -> None:
    """A session with a name that cannot be imported, or a field that reports do not have."""
    (session,) = blocks(ROOT / "docs" / "kernels.md", "pycon")
    for line in re.findall(r"^>>> (from .*)$", session, re.MULTILINE):
        exec(line, {})
    fields = re.findall(r"\breport\.(\w+)", session)
    assert fields
    for field in fields:
        assert hasattr(CompileReport, field), field


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_paths(page: Path) -> None:
    """A link to a page, a heading or a file that is not there, or a path in the text."""
    text = page.read_text()
    for target in re.findall(r"\]\(([^)#:]+)\)", text):
        assert (page.parent / target).exists(), target
    for target, heading in re.findall(r"\]\(([^):]*)#([^)]+)\)", text):
        linked = (page.parent / target) if target else page
        titles = re.findall(r"^#+ (.*)$", linked.read_text(), re.MULTILINE)
        slugs = {re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title in titles}
        assert heading in slugs, f"{target}#{heading}"
    folders = "|".join((*PACKAGES, "tests", "benchmarks", "scripts", "docs", "requirements"))
    for target in re.findall(rf"`((?:{folders})/[\w/.]*)(?: --[^`]*)?`", text):
        assert (ROOT / target).exists(), target


def commands(page: Path) -> Iterator[str]:
    """The commands of a page, in blocks without a language and in the text, without comments."""
    for block in blocks(page, ""):
        for line in block.splitlines():
            command = line.split("  #")[0].strip()
            if command:
                yield command
    for span in spans(prose(page)):
        if re.match(r"(make|glm53|python|pip) [\w-]|\.venv\S*/python |benchmarks/\S+ --", span):
            yield span


COMMANDS = sorted({(page.name, command) for page in PAGES for command in commands(page)})


@pytest.mark.parametrize(("page", "command"), COMMANDS)
def test_command(page: str, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A command whose program, target, script or flags do not exist."""
    words = shlex.split(command.split(" | ")[-1].split(" < ")[0].split(" > ")[0])
    if words[0].startswith("benchmarks/"):
        words.insert(0, "python")
    if words[0] == "make":
        check_make(words[1:])
    elif words[0] == "glm53":
        check_glm53(words[1:])
    elif re.fullmatch(r"(\.venv\S*/bin/)?python", words[0]):
        check_python(words[1:], monkeypatch)
    elif words[:3] == ["pip", "install", "-e"]:
        project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
        (extra,) = re.findall(r"\[(\w+)\]", words[3])
        assert extra in project["optional-dependencies"]
    else:
        assert words[0].startswith("scripts/"), f"{page}: unknown command {command!r}"
        assert (ROOT / words[0]).stat().st_mode & 0o111, f"{words[0]} cannot be executed"


def check_make(words: list[str]) -> None:
    """The targets exist, and the Makefile uses the variables."""
    subprocess.run(["make", "--dry-run", *words], cwd=ROOT, check=True, capture_output=True)
    for word in words:
        name, is_variable, _ = word.partition("=")
        assert not is_variable or f"$({name})" in MAKEFILE, f"the Makefile has no {name}"


def check_glm53(words: list[str]) -> None:
    """The command line accepts the words; `info`, which computes nothing, runs."""
    if len(words) == 1:
        with pytest.raises(SystemExit) as ended:
            parse([*words, "--help"])
        assert ended.value.code == 0
        return
    options = parse([word for word in words if word != "..."])
    if words[0] == "info":
        assert options.run(options) == 0


def check_python(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The script or module is there, and accepts its options."""
    if words[:2] == ["-m", "pytest"]:
        assert all((ROOT / word).exists() for word in words if word.startswith("tests/"))
        return
    module = words[1] if words[0] == "-m" else words[0].removesuffix(".py").replace("/", ".")
    options = words[2:] if words[0] == "-m" else words[1:]
    parsers = list[argparse.ArgumentParser]()

    class ParsedError(Exception):
        """Raised in place of running the script."""

    def parse_args(parser: argparse.ArgumentParser, arguments: object = None) -> None:
        parsers.append(parser)
        raise ParsedError

    with monkeypatch.context() as patch:
        patch.setattr(argparse.ArgumentParser, "parse_args", parse_args)
        with pytest.raises(ParsedError):
            importlib.import_module(module).main()
    parsers[0].parse_args(options)


def table(page: str, title: str) -> list[list[str]]:
    """The cells of a Markdown table, by the words of its first cell in the header."""
    text = (ROOT / page).read_text()
    (found,) = re.findall(
        rf"^\| {re.escape(title)}.*\|\n\|[-|]*\|\n((?:\|.*\n)+)", text, re.MULTILINE
    )
    return [[cell.strip() for cell in row.strip("|").split(" | ")] for row in found.splitlines()]


PUBLIC = {spans(row[0])[0]: spans(row[1]) for row in table("README.md", "module")}


@pytest.mark.parametrize(("module", "names"), PUBLIC.items(), ids=PUBLIC)
def test_public_names(module: str, names: list[str]) -> None:
    """A public name that cannot be imported, or one of an `__all__` that the README leaves out."""
    found = importlib.import_module(module)
    for name in names:
        assert getattr(found, name) is not None
    assert set(names) == set(getattr(found, "__all__", names))


def test_public_modules() -> None:
    """A module with an `__all__` that the README leaves out."""
    for package in PACKAGES:
        for path in (ROOT / package).rglob("__init__.py"):
            module = ".".join(path.parent.relative_to(ROOT).parts)
            assert "__all__" not in path.read_text() or module in PUBLIC, module


def test_picture_of_packages() -> None:
    """An arrow of the first picture that is no import, or an import without an arrow."""
    picture, *_ = blocks(ROOT / "docs" / "design.md", "mermaid")
    drawn = set(re.findall(r"^ *(\w+) --> (\w+)$", picture, re.MULTILINE))
    imports = set()
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            if path == ROOT / "glm53" / "__init__.py":
                continue  # Its lazy imports point upwards.
            for node in ast.walk(ast.parse(path.read_text())):
                names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
                names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
                imports |= {(package, name.split(".")[0]) for name in names}
    assert drawn == {(low, high) for low, high in imports if high in PACKAGES and low != high}


def test_map_of_folders() -> None:
    """A folder of a package that docs/design.md does not list, or lists and is not there."""
    (tree,) = blocks(ROOT / "docs" / "design.md", "text")
    listed, parent = set(), ""
    for line in tree.splitlines():
        name, _, _ = line.strip().partition("/")
        parent = parent if line.startswith(" ") else name
        listed.add(f"{parent}/{name}" if line.startswith(" ") else name)
    for folder in listed:
        assert (ROOT / folder).is_dir(), folder
    for package in PACKAGES[:-1]:  # Operations are not listed by name.
        folders = {path.parent for path in (ROOT / package).glob("*/*.py")}
        assert {str(folder.relative_to(ROOT)) for folder in folders} <= listed


# CHANGELOG.md has names of earlier versions.
@pytest.mark.parametrize(
    "page", [page for page in PAGES if page.name != "CHANGELOG.md"], ids=lambda page: page.name
)
def test_identifiers(page: Path) -> None:
    """A name that the code does not have."""
    for span in spans(prose(page)):
        if re.fullmatch(r"[A-Za-z_][\w.]*(\(\w*\))?", span):
            for name in re.findall(r"[A-Za-z_]\w*", span):
                assert name in WORDS, span


@pytest.mark.parametrize(
    ("page", "title", "described", "others"),
    [
        ("docs/generate.md", "option", EngineOptions, {"warm_up"}),
        ("docs/generate.md", "`SamplingParams`", SamplingParams, set()),
        ("docs/kv_store.md", "counter", CacheCounters, set()),
        ("docs/serving.md", "field", LoopMetrics, {"hit_rate"}),
        ("docs/kernels.md", "field", CompileReport, {"launches"}),
    ],
)
def test_table(page: str, title: str, described: type, others: set[str]) -> None:
    """A field that a table leaves out or makes up, or another default than the table gives."""
    fields = {field.name: field.default for field in dataclasses.fields(described)}
    documented = set()
    for row in table(page, title):
        names = spans(row[0])
        documented |= set(names) | others & set(spans(row[-1]))
        try:
            defaults = ast.literal_eval(row[1].strip("`"))
        except (SyntaxError, ValueError):
            continue
        defaults = defaults if isinstance(defaults, tuple) else (defaults,) * len(names)
        for name, default in zip(names, defaults, strict=True):
            assert name in others or fields[name] == default, name
    assert documented == set(fields) | others
