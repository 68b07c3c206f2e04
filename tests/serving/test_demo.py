"""The demonstration: what it refuses, and what it shows."""

import sys
from pathlib import Path

import pytest

from serving import demo


@pytest.mark.parametrize(
    ("name", "found", "message"),
    [
        ("strip.png", None, "--plot needs matplotlib: pip install matplotlib"),
        ("strip.txt", object(), "--plot strip.txt must end in .pdf, .png, .svg"),
        ("no/strip.png", object(), "--plot no/strip.png: there is no directory 'no'"),
    ],
)
def test_plot_that_cannot_be_drawn(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
    tmp_path: Path,
    name: str,
    found: object,
    message: str,
) -> None:
    """Refused before the model is loaded, with one line."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("importlib.util.find_spec", lambda _: found)
    monkeypatch.setattr("serving.demo.Engine", lambda *_: pytest.fail("the model was loaded"))
    monkeypatch.setattr(sys, "argv", ["demo", "--plot", name])
    assert demo.main() == 2
    assert capsys.readouterr() == ("", f"glm53: {message}\n")


@pytest.mark.compiles
@pytest.mark.slow
def test_answers_and_strips(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, tmp_path: Path
) -> None:
    """The planted codes, of pages that have left the device and of which rows have come back."""
    plot = tmp_path / "strip.png"
    monkeypatch.setattr(sys, "argv", ["demo", "--plot", str(plot)])
    monkeypatch.setenv("COLUMNS", "150")
    assert demo.main() == 0
    lines = capsys.readouterr().out.splitlines()
    answers = [
        line.split(":")[1].strip() for line in lines if line.startswith(("Answer:", "Planted:"))
    ]
    cached = [line for line in lines if line.startswith("Cached:")]
    assert cached[0] == "Cached:    0 tokens"
    assert cached[1].endswith(" tokens, from the question before")
    assert len(answers) == 4
    assert answers[0] == answers[1] != answers[2] == answers[3]
    prompts = [line[13:] for line in lines if line.startswith("prompt ")]
    answer = [line[13:] for line in lines if line.startswith("answer ")]
    assert prompts[0] == "#" * 8
    assert set(prompts[15]) == {".", "#"} and len(prompts[15]) == 125
    assert all(set(line) == {".", "o", "#"} and line.count("#") <= 12 for line in answer)
    assert plot.stat().st_size > 10_000
