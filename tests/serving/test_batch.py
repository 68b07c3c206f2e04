"""Batch files: rows against what the model gives alone, and what every kind of bad line gets."""

import io
import itertools
import json
from collections.abc import Iterator
from typing import Any

import pytest

from glm53 import LLM, RequestOutput, SamplingParams, chat
from serving import batch
from serving.batch import BatchCounts, run_batch
from tests.helpers.fake_llm import COMPLETIONS, FakeLLM, answer, error_of, line, one_by_one

pytestmark = pytest.mark.compiles

CHAT = "/v1/chat/completions"
MAX_SEQS = 4
TEXT = "The Congress of the United States"


@pytest.fixture(scope="module")
def llm(tiny_llm: LLM) -> LLM:
    return tiny_llm


def run(llm: LLM, data: bytes) -> tuple[list[dict[str, Any]], BatchCounts]:
    target = io.BytesIO()
    counts = run_batch(llm, io.BytesIO(data), target, ["tiny"], lambda _: None)
    rows = [json.loads(row) for row in target.getvalue().splitlines()]
    assert len(rows) == counts.succeeded + counts.failed
    assert not target.getvalue() or target.getvalue().endswith(b"\n")
    return rows, counts


# --- the model's answers ---


def question(number: int) -> list[dict[str, Any]]:
    text = f"The code of mint is {number % 90 + 10}-94.\nWhat is the code of mint?"
    return [{"role": "user", "content": text}]


def good_request(number: int) -> tuple[str, dict[str, Any]]:
    """One of eight kinds of request that can be served."""
    seeded = {"temperature": 1, "seed": number, "top_p": 1}
    kinds: list[tuple[str, dict[str, Any]]] = [
        (CHAT, {"messages": question(number), "temperature": 0, "max_tokens": 16}),
        (CHAT, {"messages": question(number), "max_completion_tokens": 6, **seeded}),
        (COMPLETIONS, {"prompt": f"{TEXT} {number}", "temperature": 0, "max_tokens": 6}),
        (COMPLETIONS, {"prompt": [900 + number, 266, 260], "n": 2, "max_tokens": 5, **seeded}),
        (COMPLETIONS, {"prompt": [TEXT, f"{number}"], "max_tokens": 4, **seeded}),
        (COMPLETIONS, {"prompt": [[7, number], [number]], "echo": True, "max_tokens": 3, **seeded}),
        (COMPLETIONS, {"prompt": TEXT, "logprobs": 2, "max_tokens": 4, "min_p": 0.1, **seeded}),
        (COMPLETIONS, {"prompt": TEXT, "temperature": 0, "stop": [" of"], "user": f"{number}"}),
    ]
    return kinds[number % len(kinds)]


def served_alone(llm: LLM, url: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """What the choices of a response must hold, from the request run by itself."""
    assert llm.tokenizer is not None
    names = ("temperature", "seed", "top_p", "min_p", "n", "stop", "logprobs")
    fields = {name: body[name] for name in names if name in body}
    limit = body.get("max_tokens", body.get("max_completion_tokens", 16))
    params = SamplingParams(max_tokens=limit, **fields)
    if url == CHAT:
        (output,) = llm.chat(body["messages"], params)
        (part,) = output.outputs
        parsed = chat.parse(part.text)
        return [
            {"content": parsed.content, "reasoning": parsed.reasoning, "finish": part.finish_reason}
        ]
    prompt = body["prompt"]
    if isinstance(prompt, str):
        prompts: list[Any] = [prompt]
    elif isinstance(prompt[0], int):
        prompts = [{"prompt_token_ids": prompt}]
    else:
        prompts = [{"prompt_token_ids": ids} if isinstance(ids, list) else ids for ids in prompt]
    found = []
    for one in prompts:
        (output,) = llm.generate(one, params)
        echoed = llm.tokenizer.decode(output.prompt_token_ids) if body.get("echo") else ""
        for part in output.outputs:
            logprobs = part.logprobs and [entry.token_logprob for entry in part.logprobs]
            text = echoed + part.text
            found.append({"text": text, "logprobs": logprobs, "finish": part.finish_reason})
    return found


def shown(url: str, choice: dict[str, Any]) -> dict[str, Any]:
    """The same of a choice."""
    if url == CHAT:
        message = choice["message"]
        return {
            "content": message["content"],
            "reasoning": message["reasoning"],
            "finish": choice["finish_reason"],
        }
    logprobs = choice["logprobs"] and choice["logprobs"]["token_logprobs"]
    return {"text": choice["text"], "logprobs": logprobs, "finish": choice["finish_reason"]}


class CountingSource(io.BytesIO):
    """Counts the lines that are read."""

    lines_read = 0

    def readline(self, size: int | None = -1, /) -> bytes:
        self.lines_read += 1
        return super().readline(size)


def bad_lines() -> list[tuple[bytes, str | None, str, str]]:
    """Lines, with the custom_id, code and message of their rows."""
    invalid = "invalid_request"

    def bare(**fields: Any) -> bytes:
        given = {"custom_id": "bad", "method": "POST", "url": COMPLETIONS, "body": {"prompt": "x"}}
        return json.dumps({**given, **fields}).encode() + b"\n"

    long = "one " * 600
    return [
        (b"nope\n", None, invalid, "not JSON: Expecting value: line 1 column 1 (char 0)"),
        (b'{"custom_id": "cut",\n', None, invalid, "not JSON: Expecting property name"),
        (b"\xff\xfe{}\n", None, invalid, "not UTF-8: invalid start byte at byte 0"),
        (bare().replace(b'"x"', b'"\xc3"'), None, invalid, "not UTF-8: invalid continuation byte"),
        (b"[" * 100_000 + b"\n", None, invalid, "nested more than 128 deep"),
        (b"[1, 2]\n", None, invalid, "the line must be an object, got [1, 2]"),
        (b'"text"\n', None, invalid, "the line must be an object, got 'text'"),
        (b"null\n", None, invalid, "the line must be an object, got None"),
        (b"{}\n", None, invalid, "custom_id is missing"),
        (bare(custom_id=5), None, invalid, "custom_id must be a string, got 5"),
        (bare(custom_id=None), None, invalid, "custom_id must be a string, got None"),
        (bare(custom_id="\ud800"), None, invalid, "a text holds half a surrogate pair"),
        (
            bare(custom_id="good-0"),
            "good-0",
            invalid,
            "custom_id 'good-0' was already used on an earlier line",
        ),
        (bare(custom_id="b1", body={"prompt": "\ud800"}), "b1", invalid, "half a surrogate pair"),
        (bare(custom_id="b2", model="tiny"), "b2", invalid, "unknown field 'model' beside body"),
        (bare(custom_id="b3", method="GET"), "b3", invalid, "method must be POST, got 'GET'"),
        (bare(custom_id="b4", url="/v1/embeddings"), "b4", invalid, "got '/v1/embeddings'"),
        (bare(custom_id="b5", body=None), "b5", invalid, "body must be an object, got None"),
        (bare(custom_id="b6", body={}), "b6", invalid, "prompt must be a text, a list of texts"),
        (line("b7", prompt="x", top_q=1), "b7", invalid, "unknown field 'top_q'"),
        (line("b8", prompt="x", stream=True), "b8", invalid, "stream True is not supported"),
        (line("b9", prompt="x", temperature=-1), "b9", invalid, "temperature must be a number"),
        (
            line("b10", prompt="x", model="gpt"),
            "b10",
            "model_not_found",
            "model 'gpt' is not served",
        ),
        (line("b11", CHAT, messages=[]), "b11", invalid, "messages must be a list of at least one"),
        (
            line("b12", prompt=long),
            "b12",
            invalid,
            "tokens, more than max_model_len 512",
        ),
        (line("b13", prompt=""), "b13", invalid, "the prompt is empty"),
        (line("b14", prompt=[[1], [], [2]]), "b14", invalid, "prompt[1]: the prompt is empty"),
        (line("b15", prompt=[9999]), "b15", invalid, "the prompt holds token id 9999"),
        (line("b16", prompt=[10**300]), "b16", invalid, "the prompt holds token id 1000"),
        (line("b17", prompt=[float("nan")]), "b17", invalid, "NaN is not valid JSON"),
        (
            line("b18", prompt="x").replace(b'"x"', b"9" * 5000),
            "b18",
            invalid,
            "more than 308 digits",
        ),
        (
            line("b19", prompt="x").replace(b'"x"', b'"x", "prompt": "y"'),
            "b19",
            invalid,
            "key 'prompt' appears twice",
        ),
        (line("b20", CHAT, messages=question(1), min_tokens=2**40), "b20", invalid, "min_tokens"),
        (line("b21", prompt="x", stop_token_ids=[2**40]), "b21", invalid, "stop_token_ids holds"),
        (
            line("b22", CHAT, messages=question(1), chat_template_kwargs={"x": 1}),
            "b22",
            invalid,
            "x",
        ),
        (
            line("b23", CHAT, messages=question(1), tools=[{"name": 5}]),
            "b23",
            invalid,
            "tools[0].name",
        ),
        (line("b24", prompt="x", max_tokens=10**400), "b24", invalid, "more than 308 digits"),
        (line("b25", prompt="x", temperature=10**307), "b25", invalid, "temperature must be"),
        (line("b26", prompt="x", seed="s" * 5000), "b26", invalid, "seed must be an integer"),
        (line("b" * 5000, prompt="x", seed=0.5), "b" * 5000, invalid, "seed must be an integer"),
    ]


@pytest.mark.slow
@pytest.mark.usefixtures("as_a_user")
def test_two_hundred_lines(llm: LLM) -> None:
    """Each good line gets, in the crowd, what it gets alone, its seed's tokens included; each bad
    one its own error; and lines are read only as fast as they can be served."""
    bad = bad_lines()
    num_good = 200 - len(bad)
    good = [(f"good-{number}", *good_request(number)) for number in range(num_good)]
    # A bad line behind every third good one, the first behind the one whose custom_id it repeats.
    lines: list[tuple[bytes, str | None]] = []
    for number, (custom_id, url, body) in enumerate(good):
        lines.append((line(custom_id, url, **body), custom_id))
        if number % 3 == 0 and number // 3 < len(bad):
            lines.append(bad[number // 3][:2])
    assert len(lines) == 200
    source, target, ahead = CountingSource(b"".join(text for text, _ in lines)), io.BytesIO(), []

    def note(_: BatchCounts) -> None:
        ahead.append(source.lines_read - len(ahead) - 1)

    counts = run_batch(llm, source, target, ["tiny"], note)
    rows = [json.loads(row) for row in target.getvalue().splitlines()]
    assert (counts.succeeded, counts.failed) == (num_good, len(bad))
    assert len(rows) == len(ahead) == 200
    assert max(ahead) <= 2 * MAX_SEQS + 1
    assert len({row["id"] for row in rows}) == 200

    failed = {row["error"]["line"]: row for row in rows if row["error"] is not None}
    numbers = [
        index for index, (text, _) in enumerate(lines, 1) if text in {text for text, *_ in bad}
    ]
    assert sorted(failed) == numbers
    for index, (_, custom_id, code, message) in zip(numbers, bad, strict=True):
        found = error_of(failed[index])
        assert failed[index]["custom_id"] == custom_id
        assert found[0] == code
        assert message in found[1]
        assert len(found[1]) < 1100

    answered = {row["custom_id"]: row for row in rows if row["error"] is None}
    assert list(answered) != [custom_id for custom_id, *_ in good], "in the order of completion"
    for custom_id, url, body in good:
        response = answered[custom_id]["response"]
        assert response["status_code"] == 200
        assert response["request_id"]
        choices = response["body"]["choices"]
        assert [choice["index"] for choice in choices] == list(range(len(choices)))
        assert [shown(url, choice) for choice in choices] == served_alone(llm, url, body), body


def test_greedy_answer(llm: LLM) -> None:
    """The built-in model's recall, read from a row as a client reads it."""
    (row,), counts = run(llm, line("x", CHAT, messages=question(21), temperature=0))
    assert (counts.succeeded, counts.failed) == (1, 0)
    choice = row["response"]["body"]["choices"][0]
    assert choice["message"]["content"] == "The code of mint is 31-94."
    assert choice["finish_reason"] == "stop"
    assert row["response"]["body"]["model"] == "tiny"


def test_echo_with_logprobs(llm: LLM) -> None:
    """What lm-eval asks: the log-probabilities of a text, with and without a token behind it."""
    assert llm.tokenizer is not None
    ids = llm.tokenizer.encode(TEXT)
    fields = {"prompt": [ids, ids[:4]], "echo": True, "logprobs": 1, "temperature": 0}
    rows, _ = run(llm, line("0", max_tokens=0, **fields) + line("1", max_tokens=1, **fields))
    (reference,) = llm.generate(
        TEXT, SamplingParams(max_tokens=1, prompt_logprobs=1, temperature=0)
    )
    assert reference.prompt_logprobs is not None
    expected = [entry and entry.token_logprob for entry in reference.prompt_logprobs]
    for row, extra in zip(sorted(rows, key=lambda row: row["custom_id"]), (0, 1), strict=True):
        long, short = row["response"]["body"]["choices"]
        assert long["text"] == TEXT + (reference.outputs[0].text if extra else "")
        assert long["logprobs"]["token_logprobs"][: len(ids)] == expected
        assert len(long["logprobs"]["tokens"]) == len(ids) + extra
        assert short["logprobs"]["token_logprobs"][:4] == expected[:4]
        assert row["response"]["body"]["usage"]["completion_tokens"] == 2 * extra


def test_echo_of_the_longest_prompt(llm: LLM) -> None:
    """`max_tokens` 0 leaves room for a prompt as long as the model allows, and no longer one."""
    fields = {"echo": True, "logprobs": 0, "max_tokens": 0}
    data = [line(str(count), prompt=[266] * count, **fields) for count in (512, 513)]
    rows, counts = run(llm, b"".join(data))
    assert (counts.succeeded, counts.failed) == (1, 1)
    found = {row["custom_id"]: row for row in rows}
    body = found["512"]["response"]["body"]
    assert body["usage"] == {"prompt_tokens": 512, "completion_tokens": 0, "total_tokens": 512}
    (choice,) = body["choices"]
    assert len(choice["logprobs"]["token_logprobs"]) == 512
    assert choice["finish_reason"] == "length"
    assert "513 tokens" in error_of(found["513"])[1]


def test_echo_of_a_prompt_within_a_character(llm: LLM) -> None:
    """The character is there once, whether the output goes on with it or not."""
    assert llm.tokenizer is not None
    ids = llm.tokenizer.encode("a€")
    fields = {"prompt": ids[:-1], "echo": True, "logprobs": 0, "max_tokens": 1}
    data = [
        line("€", allowed_token_ids=ids[-1:], **fields),
        line("\ufffda", allowed_token_ids=ids[:1], **fields),
    ]
    rows, _ = run(llm, b"".join(data))
    for row in rows:
        (choice,) = row["response"]["body"]["choices"]
        assert choice["text"] == "a" + row["custom_id"]
        assert choice["logprobs"]["text_offset"] == [0, 1, 1, len(row["custom_id"])]


def test_forms_of_messages(llm: LLM) -> None:
    """Conversations are read as those of `LLM.chat`, and may be continued."""
    call = {"function": {"name": "now", "arguments": ""}}
    messages = [
        {"role": "developer", "content": "Be brief."},
        *question(21),
        {"role": "assistant", "content": None, "reasoning": "r", "tool_calls": [call]},
        {"role": "assistant", "content": "The code of mint"},
    ]
    ends: dict[str, Any] = {"add_generation_prompt": False, "continue_final_message": True}
    rows, counts = run(
        llm,
        line("x", CHAT, messages=messages, temperature=0, **ends)
        + line("y", CHAT, messages=messages, continue_final_message=True),
    )
    assert (counts.succeeded, counts.failed) == (1, 1)
    found = {row["custom_id"]: row for row in rows}
    (output,) = llm.chat(messages, SamplingParams(temperature=0, max_tokens=None), **ends)
    message = found["x"]["response"]["body"]["choices"][0]["message"]
    assert message == {"role": "assistant", "content": output.outputs[0].text, "reasoning": None}
    assert "are both true" in error_of(found["y"])[1]


@pytest.mark.slow
def test_large_lines(llm: LLM) -> None:
    """10 MB that change nothing are served, a prompt of 10 MB is refused, a line over the limit is
    not kept, and the lines after them are read."""
    small = {"prompt": [7, 8], "max_tokens": 1, "temperature": 0}
    lines = [
        line("a", metadata={"x": "y" * 10_000_000}, **small),
        line("b", prompt="The Congress " * 800_000),
        line("c", metadata={"x": "y" * batch.MAX_LINE_BYTES}, **small),
        line("d", **small),
    ]
    rows, counts = run(llm, b"".join(lines))
    assert (counts.succeeded, counts.failed) == (2, 2)
    found = {row["custom_id"]: row for row in rows}
    assert found["a"]["response"]["body"]["choices"] == found["d"]["response"]["body"]["choices"]
    assert "tokens, more than max_model_len 512" in error_of(found["b"])[1]
    assert error_of(found[None]) == ("invalid_request", "the line is longer than 33554432 bytes")
    assert found[None]["error"]["line"] == 3


# --- lines and rows ---


def test_limit_of_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """A line as long as the limit is read, with and without a line break; one byte more is not."""
    text = line("a", prompt="x").rstrip()
    for data, fits in ((text, 0), (text, 1), (text + b"\n", 0), (text + b"\n", 1)):
        monkeypatch.setattr(batch, "MAX_LINE_BYTES", len(text) - 1 + fits)
        (row,), _ = run(FakeLLM(one_by_one), data)
        assert (row["error"] is None) == bool(fits)


def test_line_breaks() -> None:
    """CRLF, blank lines, a last line without a break, and no break but "\\n"."""
    data = line("a", prompt="x").replace(b"\n", b"\r\n") + b"\n \r\n\n"
    data += '{"custom_id": "\u2028\x85", "method": "POST"}\n'.encode()
    data += line("b", prompt="x").rstrip()
    rows, counts = run(FakeLLM(one_by_one), data)
    assert [row["custom_id"] for row in rows] == ["a", "\u2028\x85", "b"]
    assert (counts.succeeded, counts.failed) == (2, 1)
    assert rows[1]["error"]["line"] == 5


@pytest.mark.parametrize("data", [b"", b"\n\n", b" "])
def test_nothing_to_do(data: bytes) -> None:
    assert run(FakeLLM(one_by_one), data) == ([], BatchCounts())


def test_prompts_of_a_row_in_any_order() -> None:
    """A row is written when its last prompt is done, its choices in the order of the prompts; one
    that fails is written once, and its other prompts are not drawn."""
    drawn = []

    def backwards(requests: Any) -> Iterator[tuple[int, RequestOutput]]:
        for start in range(0, 4, 2):
            drawn.append(len(list(itertools.islice(requests, 2))))
            yield answer(start + 1)
            if start == 0:
                yield answer(start)
            else:
                yield start, RequestOutput("", None, [], None, [], finished=True, error="bad")
        drawn.append(len(list(requests)))
        yield answer(4)

    data = line("a", prompt=["0", "1"]) + line("b", prompt=["2", "3", "4", "5"])
    data += line("c", prompt="6")
    rows, counts = run(FakeLLM(backwards), data)
    assert [row["custom_id"] for row in rows] == ["a", "b", "c"]
    texts = [choice["text"] for choice in rows[0]["response"]["body"]["choices"]]
    assert texts == ["answer 0", "answer 1"]
    assert error_of(rows[1]) == ("invalid_request", "prompt[0]: bad")
    assert drawn == [2, 2, 1]
    assert (counts.succeeded, counts.failed) == (2, 1)


class EndlessSource(io.RawIOBase):
    """A million lines, each made when it is read, all bad but every tenth."""

    num_read = 0

    def readline(self, size: int | None = -1, /) -> bytes:
        self.num_read += 1
        if self.num_read > 1_000_000:
            return b""
        custom_id = f"{self.num_read}"
        return line(custom_id, prompt="x") if self.num_read % 10 == 0 else b"nope\n"


@pytest.mark.usefixtures("as_a_user")
def test_reading_is_lazy() -> None:
    """No line is read before the model asks for its prompt, nor kept."""
    source, progress = EndlessSource(), []

    def three(requests: Any) -> Iterator[tuple[int, RequestOutput]]:
        assert source.num_read == 0
        for index in range(3):
            next(requests)
            assert source.num_read == 10 * (index + 1)
            yield answer(index)

    target = io.BytesIO()
    lines: Any = source
    counts = run_batch(
        FakeLLM(three), lines, target, ["tiny"], lambda _: progress.append(target.tell())
    )
    assert (counts.succeeded, counts.failed) == (3, 27)
    # Every row is in the file when it is counted.
    assert progress == sorted(set(progress))
    assert target.getvalue().count(b"\n") == len(progress) == 30


def test_model_without_a_tokenizer() -> None:
    """Its answers would have no text."""
    llm = FakeLLM(one_by_one)
    llm.tokenizer = None
    with pytest.raises(ValueError, match=r"no tokenizer\.json"):
        run(llm, line("a", prompt=[1]))
