"""Differences between the chat templates of GLM-5.3, 5.2, 5.1 and 5."""

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class Template:
    """Differences of one model's prompt format.

    Attributes:
        effort_levels: Values of `reasoning_effort` that are honoured; any other means Max. Empty:
            the prompt has no effort line.
        clear_thinking: Value of the option `clear_thinking` when it is not given.
        thinking_off: What a generation prompt ends in with thinking off, None if it is always on.
        empty_thinking: What stands for reasoning that is absent or cleared.
        empty_thinking_now: The same in turns after the last user message, with thinking on.
        strip_reasoning: Whether reasoning loses the whitespace around it.
        unwrap_tools: Whether a tool is written as its `function`, without the keys that are no
            concern of the model and without tools whose loading is deferred; else as it was given.
    """

    effort_levels: tuple[str, ...] = ()
    clear_thinking: bool = True
    thinking_off: str | None = "</think>"
    empty_thinking: str = "</think>"
    empty_thinking_now: str = "<think></think>"
    strip_reasoning: bool = False
    unwrap_tools: bool = True


TEMPLATES = {
    "glm-5.3": Template(
        effort_levels=("low", "high"),
        clear_thinking=False,
        thinking_off=None,
        empty_thinking="<think></think>",
    ),
    "glm-5.2": Template(
        effort_levels=("high",),
        thinking_off="<think></think>",
        empty_thinking="<think></think>",
    ),
    "glm-5.1": Template(),
    "glm-5": Template(empty_thinking_now="</think>", strip_reasoning=True, unwrap_tools=False),
}
