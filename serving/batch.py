"""Batch files: requests in the OpenAI API's JSON lines, answered with a row each."""

import codecs
import contextlib
import dataclasses
import itertools
import json
import os
import reprlib
import select
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from hashlib import blake2b
from typing import Any, BinaryIO

from glm53.tokenizer import Tokenizer
from serving.llm import LLM
from serving.openai_protocol import ROUTES, APIRequest, RequestError, is_unicode, read_json
from serving.openai_protocol.common import Respond
from serving.requests.input_processor import Prompt
from serving.requests.outputs import RequestOutput
from serving.requests.sampling_params import SamplingParams

MAX_LINE_BYTES = 32 << 20
"""Longest line, without its line break."""

_SKIPPED_AT_ONCE = 1 << 20
_MAX_MESSAGE = 1000  # Characters; a message may quote a value of any size.
_LINE_FIELDS = ("custom_id", "method", "url", "body")


@dataclasses.dataclass(frozen=True)
class BatchCounts:
    """Rows of a batch.

    Attributes:
        succeeded: with a response.
        failed: with an error.
        prompt_tokens: tokens of the prompts, of rows with a response.
        output_tokens: tokens generated, of rows with a response.
    """

    succeeded: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0


def run_batch(
    llm: LLM,
    source: BinaryIO,
    target: BinaryIO,
    served_model_names: Sequence[str],
    progress: Callable[[BatchCounts], object],
) -> BatchCounts:
    """Answers the lines of a batch file.

    Lines are read as there is room for their prompts, and rows are written as they are done. A line
    that is no request, or whose request is refused, gets a row with an error.

    Args:
        llm: the model; it must have a tokenizer.
        source: the lines, in UTF-8, ended by a line feed; blank ones are skipped, and a byte order
            mark before a line.
        target: where the rows go, unbuffered. A row of which only a part can be written is cut off
            again where the target is a file.
        served_model_names: values of `model` that are accepted; the first is the default.
        progress: called after each row, with the rows so far.

    Returns:
        How many rows there are.

    Raises:
        ValueError: the model has no tokenizer, or the source is in UTF-16 or UTF-32.
        OSError: reading failed, or a row could not be written; those before it are.
        Exception: whatever a step raised. The rows of what was done before are written.
    """
    if llm.tokenizer is None:
        raise ValueError("batch needs text: the model has no tokenizer.json")
    batch = _Batch(llm.tokenizer, served_model_names, _RowWriter(target, progress))
    with contextlib.closing(llm.serve(batch.requests(source))) as outputs:
        for place, output in outputs:
            batch.accept(place, output)
    return batch.rows.counts


def count_requests(source: BinaryIO) -> int:
    """Number of rows that a batch will have, from where a seekable source stands.

    Raises:
        ValueError: it is in UTF-16 or UTF-32.
        OSError: reading failed.
    """
    start = source.tell()
    count = sum(1 for _ in _numbered_lines(source))
    source.seek(start)
    return count


def _numbered_lines(source: BinaryIO) -> Iterator[tuple[int, bytes | None]]:
    """Lines that are not blank, with their numbers, from 1; None for one that is too long, which is
    not kept."""
    for number in itertools.count(1):
        line = _read(source, number, MAX_LINE_BYTES + 1)
        if not line:
            return
        if number == 1:
            _check_encoding(line)
        if len(line) <= MAX_LINE_BYTES or line.endswith(b"\n"):
            # Files that were joined have one each.
            line = line.removeprefix(codecs.BOM_UTF8)
            if line.strip():
                yield number, line
            continue
        while rest := _read(source, number, _SKIPPED_AT_ONCE):
            if rest.endswith(b"\n"):
                break
        yield number, None


def _read(source: BinaryIO, number: int, max_bytes: int) -> bytes:
    """The rest of a line, or as much of it as that.

    Raises:
        OSError: it could not be read; names the line.
    """
    try:
        return source.readline(max_bytes)
    except OSError as error:
        raise OSError(f"line {number} could not be read: {error.strerror}") from error


def _check_encoding(start: bytes) -> None:
    """Refuses text of two or four bytes a character, in which no line could be found.

    Raises:
        ValueError: the source starts with such text.
    """
    if start.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) or b"\0" in start[:4]:
        raise ValueError("the input is in UTF-16 or UTF-32: convert it to UTF-8")


class _RowWriter:
    """Writes whole rows and counts them.

    Attributes:
        counts: the rows so far.
    """

    def __init__(self, target: BinaryIO, progress: Callable[[BatchCounts], object]) -> None:
        self._target, self._progress = target, progress
        self.counts = BatchCounts()
        if target.seekable():
            target.seek(0, os.SEEK_END)  # Where it is opened to append, it begins elsewhere.

    def write_response(
        self,
        custom_id: str | None,
        request_id: str,
        body: dict[str, Any],
        outputs: Sequence[RequestOutput],
    ) -> None:
        response = {"status_code": 200, "request_id": request_id, "body": body}
        self._write(request_id, custom_id, response, None)
        counts = self.counts
        prompt_tokens = sum(len(output.prompt_token_ids) for output in outputs)
        output_tokens = sum(len(part.token_ids) for output in outputs for part in output.outputs)
        self._count(
            dataclasses.replace(
                counts,
                succeeded=counts.succeeded + 1,
                prompt_tokens=counts.prompt_tokens + prompt_tokens,
                output_tokens=counts.output_tokens + output_tokens,
            )
        )

    def write_error(self, custom_id: str | None, line: int, error: ValueError) -> None:
        code = error.code if isinstance(error, RequestError) else "invalid_request"
        message = str(error)
        if len(message) > _MAX_MESSAGE:
            message = f"{message[:_MAX_MESSAGE]}..."
        fault = {"code": code, "message": message, "line": line}
        self._write(uuid.uuid4().hex, custom_id, None, fault)
        self._count(dataclasses.replace(self.counts, failed=self.counts.failed + 1))

    def _write(
        self,
        unique: str,
        custom_id: str | None,
        response: dict[str, Any] | None,
        error: dict[str, Any] | None,
    ) -> None:
        row = {
            "id": f"batch_req_{unique}",
            "custom_id": custom_id,
            "response": response,
            "error": error,
        }
        self._write_whole(json.dumps(row, allow_nan=False).encode() + b"\n")

    def _write_whole(self, row: bytes) -> None:
        start = self._target.tell() if self._target.seekable() else None
        left = memoryview(row)
        try:
            while left:
                written = self._target.write(left)
                if written is None:  # A pipe that does not block, and is full.
                    select.select([], [self._target], [])
                else:
                    left = left[written:]
        except BaseException as error:
            if start is not None:
                # Devices have positions, too, and cannot be cut.
                with contextlib.suppress(OSError):
                    self._target.truncate(start)
                    self._target.seek(start)
            if not isinstance(error, OSError):
                raise
            number = self.counts.succeeded + self.counts.failed + 1
            # Not the error's own type: a reader that goes away leaves the batch undone.
            raise OSError(f"row {number} could not be written: {error.strerror}") from error

    def _count(self, counts: BatchCounts) -> None:
        self.counts = counts
        self._progress(counts)


@dataclasses.dataclass(eq=False)
class _Row:
    """A line whose request runs.

    Attributes:
        custom_id: its name.
        line: its number.
        respond: makes the body of its response.
        outputs: by prompt, None for one that is not done.
        failed: a prompt was refused, and the row is written.
    """

    custom_id: str | None
    line: int
    respond: Respond
    outputs: list[RequestOutput | None]
    failed: bool = False


class _Batch:
    """The lines of a batch in flight to rows.

    Attributes:
        rows: where the rows go.
    """

    def __init__(
        self, tokenizer: Tokenizer, served_model_names: Sequence[str], rows: _RowWriter
    ) -> None:
        self._tokenizer, self._served_model_names = tokenizer, served_model_names
        self.rows = rows
        self._seen: set[bytes] = set()
        self._places = itertools.count()
        self._running: dict[int, tuple[_Row, int]] = {}

    def requests(self, source: BinaryIO) -> Iterator[tuple[Prompt, SamplingParams]]:
        """Prompts for `LLM.serve`, a line read when it is asked for one; writes errors itself."""
        for number, data in _numbered_lines(source):
            custom_id, request = self._read_line(data)
            if isinstance(request, ValueError):
                self.rows.write_error(custom_id, number, request)
                continue
            row = _Row(custom_id, number, request.respond, [None] * len(request.prompts))
            for position, prompt in enumerate(request.prompts):
                if row.failed:
                    break
                self._running[next(self._places)] = row, position
                yield prompt, request.params

    def accept(self, place: int, output: RequestOutput) -> None:
        """Takes a prompt's output; writes the row that it completes."""
        row, position = self._running.pop(place)
        if row.failed:
            return
        if output.error is not None:
            where = f"prompt[{position}]: " if len(row.outputs) > 1 else ""
            row.failed = True
            self.rows.write_error(row.custom_id, row.line, RequestError(where + output.error))
            row.outputs.clear()
            return
        row.outputs[position] = output
        outputs = [output for output in row.outputs if output is not None]
        if len(outputs) == len(row.outputs):
            unique = uuid.uuid4().hex
            body = row.respond(outputs, self._tokenizer, unique, int(time.time()))
            self.rows.write_response(row.custom_id, unique, body, outputs)

    def _read_line(self, data: bytes | None) -> tuple[str | None, APIRequest | ValueError]:
        """A line's custom_id, None if it has none, and its request or what is wrong with it."""
        if data is None:
            return None, RequestError(f"the line is longer than {MAX_LINE_BYTES} bytes")
        line, fault = read_json(data)
        custom_id = line.get("custom_id") if isinstance(line, dict) else None
        if not isinstance(custom_id, str) or not is_unicode(custom_id):
            custom_id = None
        try:
            if fault is not None:
                raise RequestError(fault)
            return custom_id, self._read_request(line, custom_id)
        except ValueError as error:
            return custom_id, error
        finally:
            if custom_id is not None:
                self._seen.add(_digest(custom_id))

    def _read_request(self, line: Any, custom_id: str | None) -> APIRequest:
        if not isinstance(line, dict):
            raise RequestError(f"the line must be an object, got {reprlib.repr(line)}")
        if "custom_id" not in line:
            raise RequestError("custom_id is missing")
        if custom_id is None:
            raise RequestError(f"custom_id must be a string, got {reprlib.repr(line['custom_id'])}")
        if _digest(custom_id) in self._seen:
            raise RequestError(
                f"custom_id {reprlib.repr(custom_id)} was already used on an earlier line"
            )
        for name in line:
            if name not in _LINE_FIELDS:
                raise RequestError(f"unknown field {reprlib.repr(name)} beside body")
        for name, accepted in (("method", ("POST",)), ("url", tuple(ROUTES))):
            if line.get(name) not in accepted:
                got = reprlib.repr(line.get(name))
                raise RequestError(f"{name} must be {' or '.join(accepted)}, got {got}")
        return ROUTES[line["url"]](line.get("body"), self._served_model_names)


def _digest(custom_id: str) -> bytes:
    """Digest of a custom_id, which may be long."""
    return blake2b(custom_id.encode(), digest_size=16).digest()
