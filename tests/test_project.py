"""Guards what holds the project together: locks, import directions and the setup script."""

import ast
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import glm53

ROOT = Path(__file__).parent.parent
PACKAGES = ("glm53", "kvcache", "pallas_kernels", "serving")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
LOCKS = {
    "dev.lock": PROJECT["dependencies"] + EXTRAS["test"] + EXTRAS["dev"],
    "gpu.lock": PROJECT["dependencies"] + EXTRAS["gpu"],
    "aot.lock": PROJECT["dependencies"] + EXTRAS["test"] + EXTRAS["aot"],
}
PRIVATE_JAX = ROOT / "pallas_kernels" / "common" / "jax_internals.py"
BASH = shutil.which("bash") or "bash"


def read_pins(lock: str) -> dict[str, str]:
    """Returns the version of each locked package, having checked that each has hashes."""
    pins = {}
    entries = (ROOT / "requirements" / lock).read_text().replace("\\\n", " ").splitlines()
    for entry in entries:
        pin = re.fullmatch(
            r"([a-z0-9-]+)==(\S+)( ; [^#]+?)?(\s+--hash=sha256:[0-9a-f]{64})+\s*", entry
        )
        assert pin, f"{lock}: not a pin with hashes: {entry[:80]}"
        pins[pin[1]] = pin[2]
    return pins


def with_extras(requirement: Requirement) -> Iterator[Requirement]:
    """Yields the requirement and, one level deep, those that its extras bring."""
    yield requirement
    for extra in requirement.extras:
        for text in importlib.metadata.requires(requirement.name) or []:
            brought = Requirement(text)
            marker = brought.marker
            if marker and marker.evaluate({"extra": extra}) > marker.evaluate({"extra": ""}):
                yield brought


@pytest.mark.parametrize("lock", LOCKS)
def test_lock_holds_every_dependency(lock: str) -> None:
    """A dependency added to pyproject.toml without `make lock`, or a pin that does not fit it."""
    pins = read_pins(lock)
    for text in LOCKS[lock]:
        for requirement in with_extras(Requirement(text)):
            name = canonicalize_name(requirement.name)
            assert name in pins, f"{lock} lacks {name}; run make lock"
            assert requirement.specifier.contains(pins[name], prereleases=True), requirement


@pytest.mark.parametrize("lock", LOCKS)
def test_lock_names_no_host(lock: str) -> None:
    """A lock that is tied to one registry or to one machine's mirror."""
    text = (ROOT / "requirements" / lock).read_text()
    assert not re.search(r"://|--(extra-)?index-url|--find-links", text)


@pytest.mark.parametrize("lock", ["gpu.lock", "aot.lock"])
def test_locks_agree(lock: str) -> None:
    """A GPU that runs, or is compiled for with, other versions than the tests ran."""
    dev, other = read_pins("dev.lock"), read_pins(lock)
    shared = dev.keys() & other.keys()
    assert {name: dev[name] for name in shared} == {name: other[name] for name in shared}


def modules(package: str) -> list[Path]:
    """Returns the files of a package, which must have some."""
    files = sorted((ROOT / package).rglob("*.py"))
    assert files, f"no modules in {package}"
    return files


def imported(tree: ast.AST) -> Iterator[str]:
    """Yields the dotted name of all that is imported absolutely anywhere in a module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def is_lazy(node: ast.stmt) -> bool:
    """Tells whether a statement is `__getattr__` or an `if TYPE_CHECKING:` block."""
    if isinstance(node, ast.If):
        return ast.unparse(node.test) == "TYPE_CHECKING" and not node.orelse
    return isinstance(node, ast.FunctionDef) and node.name == "__getattr__"


@pytest.mark.parametrize(
    ("package", "above"),
    [
        ("pallas_kernels", {"kvcache", "glm53", "serving"}),
        ("kvcache", {"glm53", "serving"}),
        ("glm53", {"serving"}),
    ],
)
def test_imports_point_downwards(package: str, above: set[str]) -> None:
    """A lower package that comes to depend on one above it."""
    for file in modules(package):
        tree = ast.parse(file.read_text())
        if file == ROOT / "glm53" / "__init__.py":
            # Its lazy attributes come from serving, and a type checker must see them.
            tree.body = [node for node in tree.body if not is_lazy(node)]
        wrong = [name for name in imported(tree) if name.split(".")[0] in above]
        assert not wrong, f"{file.relative_to(ROOT)} imports {wrong}"


@pytest.mark.parametrize("package", PACKAGES)
def test_no_private_jax(package: str) -> None:
    """A use of jax's private modules, which may change in any release, outside of its place."""
    for file in modules(package):
        if file == PRIVATE_JAX:
            continue
        tree = ast.parse(file.read_text())
        wrong = [name for name in imported(tree) if name.startswith("jax._src")]
        wrong += [
            ast.unparse(node)
            for node in ast.walk(tree)
            if isinstance(node, ast.Attribute) and node.attr == "_src"
        ]
        assert not wrong, f"{file.relative_to(ROOT)} uses {wrong}"


def test_public_names() -> None:
    """A name that `dir` hides or that is not there, or a version that is not the project's."""
    assert set(glm53.__all__) <= set(dir(glm53))
    for name in glm53.__all__:
        assert getattr(glm53, name) is not None
    assert glm53.__version__ == PROJECT["version"]


def write_script(path: Path, body: str) -> None:
    """Writes an executable bash script."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!{BASH}\n{body}\n")
    path.chmod(0o755)


def run_script(script: Path, home: Path, path: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Runs a script with only these variables in its environment."""
    return subprocess.run(
        [BASH, str(script)],
        env={"PATH": path, "HOME": str(home), **env},
        capture_output=True,
        text=True,
        check=False,
    )


BROKEN = "exit 127"
WITHOUT_VENV = '[[ $2 == *"import ensurepip"* ]] || echo 3.12'
OLD, NEW, NEWER, FREE_THREADED = "echo 3.11", "echo 3.12", "echo 3.14", "echo 3.13t"


@pytest.mark.parametrize(
    ("fakes", "env", "expected"),
    [
        ({"bin/python3": OLD, "bin/python": NEW}, {}, "bin/python"),
        ({"bin/python3.12": BROKEN, "bin/python3": NEW}, {}, "bin/python3"),
        ({"bin/python3.12": WITHOUT_VENV, "bin/python3": NEW}, {}, "bin/python3"),
        ({"bin/python3.13": FREE_THREADED, "bin/python3.12": NEW}, {}, "bin/python3.12"),
        (
            {"bin/python3": NEWER, ".pyenv/versions/3.12.1/bin/python": NEW},
            {},
            ".pyenv/versions/3.12.1/bin/python",
        ),
        ({"bin/python3.12": NEW, "bin/mine": NEW}, {"PYTHON": "mine"}, "bin/mine"),
        ({"bin/python3": OLD, "bin/python3.12": BROKEN}, {}, None),
        ({}, {}, None),
        ({"bin/python3.12": NEW, "bin/mine": OLD}, {"PYTHON": "mine"}, None),
    ],
)
def test_find_python(
    tmp_path: Path, fakes: dict[str, str], env: dict[str, str], expected: str | None
) -> None:
    """A wrong interpreter picked, or none found without a word on what to install."""
    for name, body in fakes.items():
        write_script(tmp_path / name, body)
    found = run_script(ROOT / "scripts/find_python.sh", tmp_path, str(tmp_path / "bin"), **env)
    if expected:
        assert (found.returncode, found.stdout) == (0, f"{tmp_path / expected}\n")
    else:
        assert (found.returncode, found.stdout) == (1, "")
        assert "python3.12-venv" in found.stderr
        assert "PYTHON=" in found.stderr


@pytest.mark.parametrize(
    ("script", "folder", "lock"),
    [("setup.sh", ".venv", "dev.lock"), ("setup_aot.sh", ".venv-aot", "aot.lock")],
)
def test_setup(tmp_path: Path, script: str, folder: str, lock: str) -> None:
    """A setup that keeps a stale or broken environment, or redoes one that is up to date."""
    project, fake = tmp_path / "project", tmp_path / "bin/python3.13"
    scripts = (script, "make_environment.sh", "find_python.sh")
    for name in (*(f"scripts/{name}" for name in scripts), f"requirements/{lock}"):
        (project / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, project / name)
    pyproject = project / "pyproject.toml"
    pyproject.touch()
    # Copies itself as the environment's interpreter, and lets pip do nothing unless told to fail.
    write_script(
        fake,
        f"""case "$*" in
        *ensurepip*) echo 3.13 ;;
        "-m venv"*) mkdir "$3" "$3/bin" && cp "$0" "$3/bin/python" ;;
        "-m pip"*) [[ ! -e {tmp_path}/offline ]] ;;
        *) exec {sys.executable} "$@" ;;
        esac""",
    )

    def setup(**env: str) -> tuple[bool, bool]:
        """Returns whether setup succeeded and whether it made the environment anew."""
        path = f"{fake.parent}{os.pathsep}{os.defpath}"
        done = run_script(project / "scripts" / script, tmp_path, path, **env)
        return done.returncode == 0, f"making {folder} with" in done.stdout

    assert setup() == (True, True)
    assert setup() == (True, False)
    pyproject.write_text("# changed")
    assert setup() == (True, True)
    for env in ({}, {"PYTHON": "python3.13"}):
        (project / folder / "bin/python").unlink()
        assert setup(**env) == (True, True)
    project = project.rename(tmp_path / "moved")
    pyproject = project / "pyproject.toml"
    assert setup() == (True, True)
    pyproject.write_text("# changed again")
    (tmp_path / "offline").touch()
    assert setup() == (False, True)
    (tmp_path / "offline").unlink()
    assert setup() == (True, True)
    assert setup() == (True, False)


def test_setup_without_python(tmp_path: Path) -> None:
    """A setup that, lacking an interpreter, goes on or fails without saying what to do."""
    (tmp_path / "scripts").mkdir()
    for name in ("setup.sh", "make_environment.sh", "find_python.sh"):
        shutil.copy(ROOT / "scripts" / name, tmp_path / "scripts" / name)
    done = run_script(tmp_path / "scripts/setup.sh", tmp_path, str(tmp_path / "bin"))
    assert done.returncode != 0
    assert "Install one" in done.stderr
    assert not (tmp_path / ".venv").exists()


def test_mark_of_what_compiles(tmp_path: Path) -> None:
    """A test that compiles and is not marked, which `make check` would run."""
    (tmp_path / "test_compiling.py").write_text(
        """import jax, pytest
def test_unmarked():
    jax.jit(lambda x: x + 1)(1)
@pytest.mark.compiles
def test_marked():
    jax.jit(lambda x: x + 2)(1)
def test_plain():
    pass
"""
    )
    options = ["-c", ROOT / "pyproject.toml", "-p", "tests.conftest", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, "-rE", tmp_path],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert "3 passed, 1 error" in done.stdout, done.stdout
    assert "ERROR" in done.stdout and "test_unmarked - Failed: 1 programs" in done.stdout
