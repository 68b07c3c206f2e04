"""Strip of a sequence's context by page, a line a step: what is on the device, and what is not."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Int, UInt8

from kvcache.residency_view import ResidencyView

PLOT_FORMATS = (".pdf", ".png", ".svg")

_NEVER, _HOST, _CACHED, _DEVICE = range(4)
_CHARACTERS = {_HOST: ".", _CACHED: "o", _DEVICE: "#"}
_NAMES = {
    _DEVICE: "page on the device",
    _CACHED: "page in host memory, with rows in the row cache on the device",
    _HOST: "page in host memory alone",
}
_SHADES = "; the darker, the more rows"
"""Meaning of the shades of a plot."""
_BACKGROUNDS = {_HOST: 100, _CACHED: 43, _DEVICE: 44}
"""ANSI codes: bright black, yellow, blue."""
_NO_COLOUR = "\x1b[0m"

_RGB = {_NEVER: (255, 255, 255), _HOST: (214, 214, 214), _DEVICE: (31, 84, 168)}
_MIN_CACHED, _MAX_CACHED = np.array((255, 205, 130)), np.array((196, 78, 0))
"""Of a page with the fewest and with the most rows in the row cache."""


@dataclasses.dataclass(frozen=True)
class Sample:
    """A sequence after a step.

    Attributes:
        label: names the step.
        view: where its pages lie.
    """

    label: str
    view: ResidencyView


@dataclasses.dataclass(frozen=True)
class Strip:
    """Form of the lines of one context.

    Attributes:
        num_pages: pages that it will have.
        width: columns of a line.
        label_width: columns for the labels.
        colour: give cells ANSI colours besides their characters.
    """

    num_pages: int
    width: int
    label_width: int
    colour: bool

    @property
    def pages_per_cell(self) -> int:
        """Pages that one character stands for."""
        return -(-self.num_pages // max(self.width - self.label_width - 1, 1))

    def legend(self) -> list[str]:
        """Legend of the characters."""
        lines = [f"{self._cells([kind])} {name}" for kind, name in _NAMES.items()]
        if self.pages_per_cell > 1:
            lines.append(
                f"A character is {self.pages_per_cell} pages, and shows the one nearest to the "
                "device."
            )
        return lines

    def line(self, sample: Sample) -> str:
        """A step's line."""
        kinds = _kinds(sample.view)
        step = self.pages_per_cell
        cells = [int(kinds[start : start + step].max()) for start in range(0, len(kinds), step)]
        return f"{sample.label:<{self.label_width}} {self._cells(cells)}"

    def _cells(self, kinds: Sequence[int]) -> str:
        if not self.colour:
            return "".join(_CHARACTERS[kind] for kind in kinds)
        return (
            "".join(f"\x1b[{_BACKGROUNDS[kind]}m{_CHARACTERS[kind]}" for kind in kinds) + "\x1b[0m"
        )


def save_plot(parts: Sequence[tuple[str, Sequence[Sample]]], path: Path) -> None:
    """Draws strips, a page a column and a step a row.

    Args:
        parts: each context's title and samples.
        path: the file; its ending is one of `PLOT_FORMATS`.
    """
    # Only here: it is no dependency of the package, and takes a second to import.
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    heights = [len(samples) for _, samples in parts]
    width = max(len(sample.view.on_device) for _, samples in parts for sample in samples)
    figure = Figure(figsize=(12, 2 + 0.16 * sum(heights) + 0.6 * len(parts)), layout="constrained")
    panels = figure.subplots(len(parts), 1, squeeze=False, height_ratios=heights)[:, 0]
    for axes, (title, samples) in zip(panels, parts, strict=True):
        axes.imshow(strip_image([sample.view for sample in samples], width), aspect="auto")
        axes.set_title(title, fontsize=10)
        axes.set_yticks(range(len(samples)), [sample.label for sample in samples], fontsize=7)
        axes.set_yticks(np.arange(len(samples) - 1) + 0.5, minor=True)
        axes.grid(axis="y", which="minor", color="white")
        axes.tick_params(which="both", length=0)
    panels[-1].set_xlabel("page of the context")
    colours = _RGB | {_CACHED: tuple((_MIN_CACHED + _MAX_CACHED) // 2)}
    patches = [
        Patch(color="#" + bytes(colours[kind]).hex(), label=name)
        for kind, name in (_NAMES | {_CACHED: _NAMES[_CACHED] + _SHADES}).items()
    ]
    figure.legend(handles=patches, loc="outside lower center", ncols=3, fontsize=9)
    figure.savefig(path)


def strip_image(
    views: Sequence[ResidencyView], num_pages: int
) -> UInt8[np.ndarray, "steps pages 3"]:
    """Colours of pages by step; the more rows in the row cache, the darker."""
    image = np.full((len(views), num_pages, 3), _RGB[_NEVER], np.uint8)
    most = max((int(view.row_cache.max(initial=0)) for view in views), default=0)
    for row, view in zip(image, views, strict=True):
        pages = row[: len(view.on_device)]
        kinds, share = _kinds(view), (view.row_cache / max(most, 1))[:, None]
        pages[:] = _MIN_CACHED + share * (_MAX_CACHED - _MIN_CACHED)
        for kind in (_HOST, _DEVICE):
            pages[kinds == kind] = _RGB[kind]
    return image


def _kinds(view: ResidencyView) -> Int[np.ndarray, " pages"]:
    """Level of each page; the greater, the nearer to the device."""
    return np.where(view.on_device, _DEVICE, np.where(view.row_cache > 0, _CACHED, _HOST))
