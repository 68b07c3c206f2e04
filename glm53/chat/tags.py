"""Tags of the chat format that a model's output holds, and their places in a text."""

import functools
import re

THINK_OPEN, THINK_CLOSE = "<think>", "</think>"
CALL_OPEN, CALL_CLOSE = "<tool_call>", "</tool_call>"
KEY_OPEN, KEY_CLOSE = "<arg_key>", "</arg_key>"
VALUE_OPEN, VALUE_CLOSE = "<arg_value>", "</arg_value>"

CALL_TAGS = (CALL_OPEN, CALL_CLOSE, KEY_OPEN, KEY_CLOSE, VALUE_OPEN, VALUE_CLOSE)
OUTPUT_TAGS = (THINK_OPEN, THINK_CLOSE, *CALL_TAGS)


@functools.cache
def tag_pattern(tags: tuple[str, ...]) -> re.Pattern[str]:
    """Returns what finds the first of some tags; with no tags it finds nothing."""
    return re.compile("|".join(map(re.escape, tags)) or r"(?!)")


def end_of_text(text: str, start: int, tags: tuple[str, ...]) -> int:
    """Returns the end of the part of `text[start:]` that no tag can begin in.

    No tag has a second "<", so only the last one can begin a tag that the text breaks off.
    """
    place = text.rfind("<", start)
    if place >= 0 and any(tag.startswith(text[place:]) for tag in tags):
        return place
    return len(text)
