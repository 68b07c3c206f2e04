"""Requests from prompts and parameters, without an engine."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from glm53.tokenizer import Tokenizer
from serving.options.engine_options import model_path
from serving.requests.generation_config import GenerationConfig
from serving.requests.input_processor import InputProcessor, list_prompts
from serving.requests.request import Request
from serving.requests.sampling_params import SamplingParams

TOKENIZER = Tokenizer.from_dir(model_path("tiny"))
ENDS = 4


def read(prompt: Any, **params: Any) -> Request:
    reader = InputProcessor(
        tokenizer=TOKENIZER,
        generation_config=GenerationConfig({}, frozenset()),
        eos_token_ids=frozenset(range(ENDS)),
        vocab_size=TOKENIZER.vocab_size,
        max_model_len=4096,
        rows_per_page=64,
        device_pages=3,
        host_pages=1,
        page_options="device_pages or host_memory_gib",
    )
    return reader.read("0", prompt, SamplingParams(**params))


def bad_words(*words: str) -> list[str]:
    """The texts whose tokens the sampler is told not to generate."""
    sampling = read([1], bad_words=list(words)).sequences[0].sampling
    assert sampling is not None
    return [TOKENIZER.decode(list(ids), skip_special_tokens=False) for ids in sampling.bad_words]


@pytest.mark.parametrize(
    "word", ["\n", "\n\n", "\t", "\u3000", " ", "  ", "\r\n", " mint", "\nmint"]
)
def test_bad_word_that_begins_with_white_space(word: str) -> None:
    """It is that text that is banned, and no other: not the space, nor the word without it."""
    assert bad_words(word) == [word]


@pytest.mark.parametrize("word", ["mint", "The", "mint ", "the code", "x\n"])
def test_bad_word(word: str) -> None:
    """It is banned as the start of a text and behind a space."""
    assert bad_words(word) == [word, " " + word]


@given(st.text(min_size=1, max_size=6))
def test_any_bad_word(word: str) -> None:
    """A text is banned as it is, or refused by its place: never something else in its stead."""
    try:
        found = bad_words(word)
    except ValueError as error:
        assert "bad_words[0]" in str(error)
        return
    assert found == ([word] if word[0].isspace() else [word, " " + word])


def test_bad_words_that_are_too_many_or_too_long() -> None:
    """Refused by what the caller gave, not by what came of it."""
    words = [f"{number}" for number in range(130)]
    assert len(bad_words(*words[:120])) == 240
    with pytest.raises(ValueError, match="bad_words has 130 words, 260 with those behind a space"):
        bad_words(*words)
    with pytest.raises(ValueError, match=r"bad_words\[1\] 'x x.*tokens; at most 16 are"):
        bad_words("fine", "x x" * 10)


def seeds(**params: Any) -> list[int]:
    samplings = [part.sampling for part in read([1], **params).sequences]
    return [sampling.seed for sampling in samplings if sampling is not None]


@pytest.mark.parametrize(
    ("seed", "expected"),
    [
        (5, [5, 6, 7]),
        (-2, [2**64 - 2, 2**64 - 1, 0]),
        (2**64 - 1, [2**64 - 1, 0, 1]),
        (-(2**63), [2**63, 2**63 + 1, 2**63 + 2]),
    ],
)
def test_seeds_of_continuations(seed: int, expected: list[int]) -> None:
    """The i-th has seed + i modulo 2**64, in which -2 and its like are seeds as any other."""
    assert seeds(seed=seed, n=3) == expected


@pytest.mark.usefixtures("as_a_user")
@pytest.mark.parametrize("seed", [None, -1, np.int64(-1)])
def test_new_seeds(seed: Any) -> None:
    """-1 is a new seed each time, as None is."""
    assert len(set(seeds(seed=seed, n=20) + seeds(seed=seed, n=20))) == 40


@pytest.mark.usefixtures("as_a_user")
@pytest.mark.parametrize(
    "prompt",
    [
        [5, 6],
        (5, 6),
        range(5, 7),
        np.array([5, 6]),
        [np.int32(5), np.uint8(6)],
        {"prompt_token_ids": np.array([5, 6], np.uint16)},
        {"prompt_token_ids": range(5, 7)},
    ],
)
def test_ids(prompt: Any) -> None:
    """A list of ids is a prompt, of Python's numbers or numpy's."""
    (part,) = read(prompt).sequences
    assert part.token_ids == [5, 6]
    assert {type(token) for token in part.token_ids} == {int}


@pytest.mark.usefixtures("as_a_user")
@pytest.mark.parametrize("prompt", [b"ab", np.array([[1]]), [1.0], [True], {5}])
def test_what_are_no_ids(prompt: Any) -> None:
    """Nothing is taken for ids that is none."""
    with pytest.raises((TypeError, ValueError), match="token id"):
        read(prompt)


def test_more_pages_than_there_are() -> None:
    """The limit that is named fits, and one more does not; it is that of the caller, if any."""
    with pytest.raises(ValueError, match=r"max_tokens 200: .*max_tokens to at most 157, or raise"):
        read([1] * 100, max_tokens=200)
    assert read([1] * 100, max_tokens=157).sequences[0].max_tokens == 157
    with pytest.raises(ValueError, match="need 5 pages"):
        read([1] * 100, max_tokens=158)
    with pytest.raises(
        ValueError, match=r"max_tokens None, which is 3996 within max_model_len 4096"
    ):
        read([1] * 100, max_tokens=None)
    message = "the store has 4 for a request; raise device_pages or host_memory_gib$"
    with pytest.raises(ValueError, match=message):
        read([1] * 300)


def test_too_many_stop_ids() -> None:
    """The ids that the model adds are no fault of the caller's, who is told the limit."""
    read([1], stop_token_ids=list(range(10, 10 + 128 - ENDS)), min_tokens=2)
    with pytest.raises(ValueError, match=r"stop_token_ids has 126 ids: .*at most 128 .* are 130$"):
        read([1], stop_token_ids=list(range(10, 136)), min_tokens=2)
    read([1], stop_token_ids=list(range(10, 1010)))


class ForeignArray:
    """An array of a library that only NumPy knows how to read."""

    def __init__(self, values: Any) -> None:
        self._values = values

    def __array__(self, *_: object, **__: object) -> np.ndarray:
        return np.array(self._values)


@pytest.mark.compiles
@pytest.mark.usefixtures("as_a_user")
@pytest.mark.parametrize("kind", [np.array, jnp.array, ForeignArray])
def test_arrays(kind: Any) -> None:
    """Ids of other libraries, which are refused or taken for several prompts."""
    (prompt,) = list_prompts(kind([5, 6]))
    found = [read(prompt), read(kind([5, 6])), read({"prompt_token_ids": kind([5, 6])})]
    found += map(read, list_prompts(kind([[5, 6], [5, 6]])))
    assert [request.sequences[0].token_ids for request in found] == [[5, 6]] * 5
    with pytest.raises(TypeError, match="prompts must be a prompt or an iterable of prompts"):
        list_prompts(kind(5))
    with pytest.raises(ValueError, match=r"token id 1\.5"):
        read(kind([1.5, 2]))
    with pytest.raises(TypeError, match="must be text, token ids or a dict, got"):
        read(kind([[5, 6]]))


@pytest.mark.usefixtures("as_a_user")
@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        (["a", "b"], "expected one prompt, got a list of texts$"),
        ([[1, 2]], "expected one prompt, got a list of lists$"),
        ([{"prompt": "a"}], "expected one prompt, got a list of messages or other dicts$"),
        (1.5, "text, token ids or a dict, got float 1.5$"),
        ({"role": "user", "content": "q"}, "a message of a conversation: .*LLM.chat"),
        ([5] * 4097, "4097 tokens, more than max_model_len 4096$"),
    ],
)
def test_what_is_no_prompt(prompt: Any, message: str) -> None:
    """Told as what it is, not as a wrong token id or an unknown field."""
    with pytest.raises((TypeError, ValueError), match=message):
        read(prompt, max_tokens=0)
