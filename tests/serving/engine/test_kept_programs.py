"""Compiled programs kept between processes, and what is said while one is compiled."""

import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache

from serving.engine import compile_notice as notices
from serving.engine.compile_notice import compile_notice, without_compile_notices
from serving.engine.engine import Engine
from serving.engine.warm_up import keep_compiled_programs, warm_up_programs
from tests.helpers.full_disk import full_disk
from tests.helpers.terminal import terminal
from tests.helpers.toy_engine import finish, request, tokens, toy_options

pytestmark = pytest.mark.compiles
LEAST_SECONDS = "jax_persistent_cache_min_compile_time_secs"
SETTINGS = ("jax_compilation_cache_dir", LEAST_SECONDS, "jax_enable_compilation_cache")


@pytest.fixture
def as_at_start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """jax as it is where nothing is set, and the place for caches, until the test is done."""
    before = {name: getattr(jax.config, name) for name in SETTINGS}
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    monkeypatch.delenv(LEAST_SECONDS.upper())
    compilation_cache.reset_cache()
    try:
        for name, value in zip(SETTINGS, (None, 1.0, True), strict=True):
            jax.config.update(name, value)
        yield tmp_path / "caches"
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()


def run_program(constant: float) -> None:
    """Runs a small program that jax has not compiled, or read, in this process."""
    result = jax.jit(lambda x: x * constant + 1)(np.ones(3, np.float32))
    np.testing.assert_array_equal(result, np.full(3, constant + 1, np.float32))


def kept(caches: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in (caches / "glm53").glob("*-cache")}


def test_all_are_kept(as_at_start: Path) -> None:
    """Programs compiled anew by each process, for they took less than a second."""
    keep_compiled_programs()
    run_program(3.5)
    assert len(kept(as_at_start)) == 1


def test_any_engine_keeps_them(as_at_start: Path, tmp_path: Path) -> None:
    """An entry point whose next process compiles everything again."""
    Engine(toy_options(tmp_path / "model"))
    assert kept(as_at_start)


@pytest.mark.usefixtures("as_at_start")
def test_what_the_user_says_stands(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A choice that is overridden."""
    jax.config.update("jax_enable_compilation_cache", False)
    keep_compiled_programs()
    assert jax.config.jax_compilation_cache_dir is None
    jax.config.update("jax_enable_compilation_cache", True)
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "chosen"))
    monkeypatch.setenv(LEAST_SECONDS.upper(), "1.0")
    keep_compiled_programs()
    assert jax.config.jax_compilation_cache_dir == str(tmp_path / "chosen")
    assert getattr(jax.config, LEAST_SECONDS) == 1.0


def test_a_torn_program(as_at_start: Path) -> None:
    """A program that each later process finds damaged, and warns of."""
    keep_compiled_programs()
    run_program(4.5)
    ((name, whole),) = kept(as_at_start).items()
    for size in (0, len(whole) // 2, len(whole) - 1):
        (as_at_start / "glm53" / name).write_bytes(whole[:size])
        run_program(4.5)
        assert len(kept(as_at_start)[name]) > len(whole) - 100


def test_a_full_disk(as_at_start: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A program that is kept torn, or a warning for each."""
    keep_compiled_programs()
    with full_disk(100):
        for constant in (5.5, 6.5, 7.5):
            run_program(constant)
    assert not kept(as_at_start)
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert f"no longer kept in {as_at_start / 'glm53'}: File too large" in caplog.text


@pytest.mark.parametrize("has_home", [True, False])
def test_nowhere_to_keep_them(
    has_home: bool,
    as_at_start: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An error, or a warning for each program."""
    if has_home:
        as_at_start.write_text("not a directory")
    else:
        monkeypatch.delenv("XDG_CACHE_HOME")
        monkeypatch.delenv("HOME")
        monkeypatch.setattr("pwd.getpwuid", lambda uid: {}[uid])
    keep_compiled_programs()
    run_program(8.5)
    run_program(9.5)
    (record,) = caplog.records
    assert "compiled programs are not kept" in record.getMessage()


def test_says_what_is_compiled(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """A pause in which nothing is said, or something after each."""
    given: list[str] = []
    # As if everything took long.
    monkeypatch.setattr(notices, "_give", lambda what, done: given.append(what))
    engine = Engine(toy_options(tmp_path / "model"))
    for turn in range(2):
        finish(engine, request(engine, str(turn), tokens(turn, 20), temperature=1.0, seed=1))
    rows, pages = engine.runner.buckets.prefills[0]
    assert given == [
        f"the prefill of {rows} rows, {pages} pages",
        "the sampler of 1",
        f"the decode of 1, {engine.runner.buckets.context_pages[0]} pages",
    ]


@pytest.mark.parametrize("columns", [24, 80, 400])
def test_notice_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, columns: int
) -> None:
    """A line without the time on a narrow terminal, that stays when there is nothing to wait for,
    or that the log repeats."""
    monkeypatch.setattr(notices, "PATIENCE_SECONDS", 0.0)
    monkeypatch.setattr(notices, "_where_kept", lambda: f" (kept in {'long/' * 20})")
    with terminal(columns) as shown:
        monkeypatch.setattr(sys, "stderr", shown.stream)
        with compile_notice("5 steps"):
            while "00:00 compiling 5 steps" not in shown.read():
                pass
        text = shown.read()
    assert text.endswith("\r")
    assert ("00:00 compiling 5 steps for first use" in text) == (columns > 24)
    assert ("for first use (kept in long/" in text) == (columns > 80)
    assert not caplog.records


def test_notice_on_a_terminal_without_columns(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing said where a bar would show nothing."""
    monkeypatch.setattr(notices, "PATIENCE_SECONDS", 0.0)
    with terminal(0) as shown:
        monkeypatch.setattr(sys, "stderr", shown.stream)
        with compile_notice("5 steps"):
            while not caplog.records:
                pass


@pytest.mark.usefixtures("as_a_user")
@pytest.mark.parametrize("columns", [0, 80])
def test_notice_of_a_warm_up(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, columns: int
) -> None:
    """A bar where none is shown and no notice instead, or both."""
    monkeypatch.setattr(notices, "PATIENCE_SECONDS", 0.0)

    def launch() -> None:
        while not columns and not caplog.records:
            pass

    runner: Any = SimpleNamespace(programs=[("a", launch), ("b", launch)], synchronize=lambda: None)
    with terminal(columns) as shown:
        monkeypatch.setattr(sys, "stderr", shown.stream)
        warm_up_programs(runner)
        assert ("2/2" in shown.read()) == bool(columns)
    said = [record.getMessage().partition(" (kept in")[0] for record in caplog.records]
    assert said == ([] if columns else ["compiling 2 steps for first use"])


def test_notice(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """A warning of what takes no time, or two of the same."""
    with compile_notice("what is quick"):
        pass
    monkeypatch.setattr(notices, "PATIENCE_SECONDS", 0.0)
    with without_compile_notices(), compile_notice("what another tells of"):
        pass
    with compile_notice("the outer"), compile_notice("the inner"):
        while not caplog.records:
            pass
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    place = jax.config.jax_compilation_cache_dir
    assert record.getMessage() == f"compiling the outer for first use (kept in {place})"
