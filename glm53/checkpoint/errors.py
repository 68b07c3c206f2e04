"""Errors of checkpoints that cannot be used."""

from collections.abc import Sequence

_SHOWN = 100


class CheckpointError(ValueError):
    """A checkpoint is incomplete, damaged, or of another model.

    Attributes:
        problems: everything that is wrong, one line each.
    """

    def __init__(self, source: object, problems: Sequence[str]) -> None:
        self.problems = tuple(problems)
        lines = [f"cannot use checkpoint {source}:", *self.problems[:_SHOWN]]
        if len(self.problems) > _SHOWN:
            lines.append(f"... and {len(self.problems) - _SHOWN} more, all in `problems`")
        super().__init__("\n  ".join(lines))
