"""The strip of the demonstration: recorded states against lines and colours written by hand."""

from pathlib import Path

import matplotlib
import numpy as np
import pytest

from kvcache.residency_view import ResidencyView
from serving.residency_strip import Sample, Strip, save_plot, strip_image


def view(pages: str, rows: int = 1) -> ResidencyView:
    """Pages by their characters; those with rows in the row cache have `rows`."""
    cached = [rows if page in "oO" else 0 for page in pages]
    return ResidencyView(np.array([page in "#O" for page in pages]), np.array(cached, np.int64))


def lines(steps: list[str], width: int, *, colour: bool = False) -> list[str]:
    strip = Strip(num_pages=12, width=width, label_width=4, colour=colour)
    return [strip.line(Sample(f"{n}", view(pages))) for n, pages in enumerate(steps)]


STEPS = ["###", "..####", "......######", "..o.o.o.OO##"]


def test_a_page_a_character() -> None:
    """A page that has come back to the device counts as one there, whatever the row cache holds."""
    assert lines(STEPS, 17) == [
        "0    ###",
        "1    ..####",
        "2    ......######",
        "3    ..o.o.o.####",
    ]


def test_several_pages_a_character() -> None:
    """The one nearest to the device is shown, and the legend says so."""
    assert lines(STEPS, 16) == [
        "0    ##",
        "1    .##",
        "2    ...###",
        "3    .ooo##",
    ]
    assert lines(STEPS, 9)[3] == "3    oo##"
    strip = Strip(num_pages=12, width=9, label_width=4, colour=False)
    assert strip.legend()[-1].startswith("A character is 3 pages")
    assert len(Strip(12, 17, 4, colour=False).legend()) == 3


@pytest.mark.parametrize("width", [1, 40, 80, 120, 200])
def test_no_line_is_longer_than_a_terminal(width: int) -> None:
    """Of 130 pages; a terminal too narrow for the label gets one character behind it."""
    strip = Strip(num_pages=130, width=width, label_width=12, colour=False)
    line = strip.line(Sample("prompt 8,320", view("." * 129 + "#")))
    assert len(line) <= max(width, 14)
    assert line[-1] == "#"
    assert strip.pages_per_cell == {1: 130, 40: 5, 80: 2, 120: 2, 200: 1}[width]


def test_colours() -> None:
    """The same characters, each on its own background."""
    (line,) = lines([".o#"], 17, colour=True)
    assert line == "0    \x1b[100m.\x1b[43mo\x1b[44m#\x1b[0m"


def test_image() -> None:
    """White where there is no page yet, and the darker the more rows the row cache holds."""
    image = strip_image([view("#"), view(".o", 1), view("oO", 4)], 3)
    assert image.shape == (3, 3, 3)
    white, host, device = (255, 255, 255), (214, 214, 214), (31, 84, 168)
    assert [tuple(pixel) for pixel in image[0]] == [device, white, white]
    assert [tuple(pixel) for pixel in image[:, 2]] == [white] * 3
    assert tuple(image[1, 0]) == host and tuple(image[2, 1]) == device
    light, dark = image[1, 1], image[2, 0]
    assert tuple(dark) == (196, 78, 0)
    assert (light.astype(int) >= dark).all() and light.sum() > dark.sum()


def test_plot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A panel a question, a row a step."""
    samples = [Sample(f"prompt {n}", view(pages)) for n, pages in enumerate(STEPS)]
    monkeypatch.setitem(matplotlib.rcParams, "svg.fonttype", "none")
    save_plot([("first", samples), ("second", samples[:1])], tmp_path / "strip.svg")
    drawing = (tmp_path / "strip.svg").read_text()
    assert "the darker, the more rows" in drawing
    assert drawing.count('id="axes_') == 2 and drawing.count('id="image') == 2
