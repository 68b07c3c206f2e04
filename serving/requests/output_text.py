"""The text of one output as its tokens come, and the search for stop texts in it."""

from collections.abc import Sequence

from glm53.tokenizer import IncrementalDetokenizer, Tokenizer


class OutputText:
    """Text so far, never with half a character, nor with what may become a stop text.

    Attributes:
        text: what may be shown; it only grows.
        stopped_by: the stop text that ended the output, or None.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        stop: Sequence[str] = (),
        include_stop: bool = False,
        skip_special_tokens: bool = True,
        prompt_ids: Sequence[int] = (),
    ) -> None:
        self._detokenizer = IncrementalDetokenizer(
            tokenizer, skip_special_tokens, prompt_ids=prompt_ids
        )
        self._stop, self._include_stop = stop, include_stop
        self._held = ""
        self.text = ""
        self.stopped_by: str | None = None

    def push(self, token_id: int, *, may_stop: bool = True) -> None:
        """Takes the next token.

        Args:
            token_id: its id.
            may_stop: whether a stop text that it completes counts; one that is complete before
                is text like any other.
        """
        self._held += self._detokenizer.push(token_id)
        if not may_stop:
            # Kept: a stop text may yet begin in what is here and end after it.
            kept = _longest_start(self._held, self._stop)
            self._show(len(self._held) - kept)
            return
        found = _first_stop(self._held, self._stop)
        if found is None:
            self._show(len(self._held) - _longest_start(self._held, self._stop))
            return
        place, self.stopped_by = found
        self._show(place + (len(self.stopped_by) if self._include_stop else 0))
        self._held = ""

    def finish(self) -> None:
        """Shows what was held back, after the last token."""
        if self.stopped_by is None:
            self._held += self._detokenizer.flush()
            self._show(len(self._held))

    def _show(self, length: int) -> None:
        self.text += self._held[:length]
        self._held = self._held[length:]


def _first_stop(text: str, stops: Sequence[str]) -> tuple[int, str] | None:
    """Place and text of the stop that is complete first; the longer of two that end together."""
    found = [(place + len(stop), place, stop) for stop in stops if (place := text.find(stop)) >= 0]
    if not found:
        return None
    _, place, stop = min(found)
    return place, stop


def _longest_start(text: str, stops: Sequence[str]) -> int:
    """Length of the longest end of `text` with which a stop text begins."""
    longest = max((len(stop) for stop in stops), default=0)
    for length in range(min(len(text), longest - 1), 0, -1):
        end = text[-length:]
        if any(stop.startswith(end) for stop in stops):
            return length
    return 0
