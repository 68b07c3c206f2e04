"""`glm53 generate`: continue one text, or answer one question."""

import argparse
import sys
from collections.abc import Iterator

from glm53 import chat
from serving.cli.options import add_engine_options, load_model
from serving.cli.process import (
    STANDARD,
    check_standard_output,
    colours_wanted,
    naming,
    open_standard_input,
    print_output,
)
from serving.llm import LLM
from serving.requests.input_processor import Prompt
from serving.requests.sampling_params import SamplingParams

_SAMPLING = ("temperature", "top_p", "top_k", "seed", "stop")
_MAX_TOKENS = 64
_DIM, _PLAIN = "\x1b[2m", "\x1b[0m"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the subcommand's arguments."""
    parser.description = (
        "Prints the continuation on standard output. With --chat, the text is a question: its "
        "answer goes there, and the model's reasoning to standard error."
    )
    parser.add_argument(
        "text",
        nargs="?",
        help="the prompt; - is standard input (default: standard input, unless it is a terminal)",
    )
    parser.add_argument("--chat", action="store_true", help="answer as an assistant (default: no)")
    parser.add_argument(
        "--max-tokens",
        type=int,
        help="maximum number of tokens to generate "
        f"(default: {_MAX_TOKENS}; with --chat, as many as --max-model-len leaves)",
    )
    parser.add_argument(
        "--temperature",
        type=float,
        help="divides the logits; 0 is greedy (default: the model's own, or 1)",
    )
    parser.add_argument(
        "--top-p",
        type=float,
        help="sample from the fewest most likely tokens with this much probability "
        "(default: the model's own, or 1)",
    )
    parser.add_argument(
        "--top-k",
        type=int,
        help="sample from this many most likely tokens; 0 is all (default: the model's own, or 0)",
    )
    parser.add_argument(
        "--seed",
        type=int,
        help="seed of the sampling; the same one gives the same output "
        "(default: a new one each time)",
    )
    parser.add_argument(
        "--stop",
        action="append",
        metavar="TEXT",
        help="end the output before this text; may be given several times (default: none)",
    )
    add_engine_options(parser)
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    check_standard_output()
    if options.text is None and sys.stdin is not None and sys.stdin.isatty():
        raise ValueError("give a text, or - for standard input")
    text = _read_standard_input() if options.text in (None, STANDARD) else options.text
    if not text:
        raise ValueError("the text is empty: give at least one character")
    max_tokens = options.max_tokens
    if max_tokens is None and not options.chat:
        max_tokens = _MAX_TOKENS
    params = SamplingParams(
        max_tokens=max_tokens, **{name: getattr(options, name) for name in _SAMPLING}
    )
    llm = load_model(options)
    if options.chat:
        prompt = {"messages": [{"role": "user", "content": text}]}
        _print_answer(_pieces(llm, prompt, params))
    else:
        for piece in _pieces(llm, text, params):
            print_output(piece, end="")
        print_output()
    return 0


def _read_standard_input() -> str:
    """The prompt, less a byte order mark before it and the line break, LF or CRLF, that ends it.

    Raises:
        OSError: standard input is closed, or cannot be read.
        ValueError: it is not UTF-8.
    """
    with naming("standard input"), open_standard_input() as source:
        try:
            text = source.read().decode("utf-8-sig")
            return text.removesuffix("\r\n") if text.endswith("\r\n") else text.removesuffix("\n")
        except UnicodeDecodeError as error:
            where = f"{error.reason} at byte {error.start}"
            raise ValueError(f"standard input is not UTF-8: {where}") from error


def _pieces(llm: LLM, prompt: Prompt, params: SamplingParams) -> Iterator[str]:
    """The text of the output as it grows."""
    shown = 0
    for _, output in llm.generate_iter(prompt, params, stream=True):
        text = output.outputs[0].text
        yield text[shown:]
        shown = len(text)


def _print_answer(pieces: Iterator[str]) -> None:
    """Prints content on standard output and reasoning on standard error, dimmed on a terminal."""
    before, after = (_DIM, _PLAIN) if sys.stderr.isatty() and colours_wanted() else ("", "")
    parser = chat.StreamingParser()
    line_ended = True

    def show(deltas: list[chat.Delta]) -> None:
        nonlocal line_ended
        for delta in deltas:
            if isinstance(delta, chat.ReasoningDelta):
                print(f"{before}{delta.text}{after}", end="", file=sys.stderr, flush=True)
                line_ended = False
            elif isinstance(delta, chat.ContentDelta):
                end_line()
                print_output(delta.text, end="")

    def end_line() -> None:
        nonlocal line_ended
        if not line_ended:
            print(file=sys.stderr, flush=True)
            line_ended = True

    for piece in pieces:
        show(parser.push(piece))
    show(parser.finish())
    end_line()
    print_output()
