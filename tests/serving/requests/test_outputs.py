"""Outputs as plain data: copies, pickles and JSON, without the engine or its tokenizer."""

import copy
import dataclasses
import json
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from glm53.tokenizer import Tokenizer
from serving.options.engine_options import model_path
from serving.requests.outputs import (
    CompletionOutput,
    Logprob,
    RequestMetrics,
    RequestOutput,
    TokenLogprobs,
    TokenTexts,
)

TOKENIZER = Tokenizer.from_dir(model_path("tiny"))
VOCAB = TOKENIZER.vocab_size


def text(token: int) -> str:
    return TOKENIZER.decode([token], skip_special_tokens=False)


@given(
    st.lists(st.integers(0, VOCAB - 1), min_size=30, max_size=30, unique=True),
    st.integers(0, 20),
    st.integers(1, 30),
    st.booleans(),
    st.integers(-1, VOCAB),
)
def test_entry_is_a_mapping_that_travels(
    ranked: list[int], count: int, rank: int, with_texts: bool, other: int
) -> None:
    """It, its copy and its pickle hold the same as a dict of vLLM's, in the same order."""
    logprobs = -np.arange(1, 31, dtype=np.float32) / 8
    expected = {
        ranked[place]: Logprob(
            float(logprobs[place]), place + 1, text(ranked[place]) if with_texts else None
        )
        for place in [*range(count), *[rank - 1] * (rank > count)]
    }
    entry = TokenLogprobs(
        ranked[rank - 1],
        float(logprobs[rank - 1]),
        rank,
        np.array(ranked[:count], np.int32),
        logprobs[:count],
        TokenTexts(TOKENIZER) if with_texts else None,
    )
    for one in (entry, copy.deepcopy(entry), pickle.loads(pickle.dumps(entry))):
        assert list(one.items()) == list(expected.items())
        assert len(one) == len(expected)
        assert one == entry == expected
        assert (other in one) == (other in expected)
        assert one.token_id == entry.token_id


def test_whole_vocabulary() -> None:
    """Of as many tokens as GLM-5.3 has, all are found, and none has a text before it is asked."""
    asked = []

    class Recorded(TokenTexts):
        def __getitem__(self, token_id: int) -> str:
            asked.append(token_id)
            return super().__getitem__(token_id)

    ids = np.random.default_rng(0).permutation(154_880).astype(np.int32)
    logprobs = -np.arange(len(ids), dtype=np.float32)
    entry = TokenLogprobs(int(ids[7]), -7.0, 8, ids, logprobs, Recorded(TOKENIZER))
    assert len(entry) == len(ids)
    assert not asked
    ranks = [entry[token].rank for token in ids[::100].tolist()]
    assert ranks == list(range(1, len(ids) + 1, 100))
    assert asked == ids[::100].tolist()
    assert len(ids) not in entry and -1 not in entry
    assert repr(entry).count("Logprob(") == 21
    assert repr(entry).endswith("...})")


@pytest.mark.usefixtures("as_a_user")
def test_keys_that_are_no_ids() -> None:
    """An error of numpy for a text that is looked up."""
    entries = output().outputs[0].logprobs
    assert entries is not None
    entry = entries[0]
    assert "x" not in entry and None not in entry
    with pytest.raises(KeyError):
        entry["x"]  # pyright: ignore[reportArgumentType]


def output() -> RequestOutput:
    ids, logprobs = np.array([932, 558], np.int32), np.array([-0.5, -1.5], np.float32)
    found = TokenLogprobs(1, -9.0, 40, ids, logprobs, TokenTexts(TOKENIZER))
    part = CompletionOutput(0, "x", [1], -9.0, [found], "length", None)
    metrics = RequestMetrics(1e9, 0.5, 1e9 + 1, 1e9 + 2)
    return RequestOutput("7", "The", [932, 5], [None, found], [part], True, metrics=metrics)


def test_output_as_dict_and_json() -> None:
    """`to_dict` is what JSON gives back, but for keys, which JSON has as text; `asdict` works."""
    plain = output().to_dict()
    expected = {
        932: {"logprob": -0.5, "rank": 1, "decoded_token": "The"},
        558: {"logprob": -1.5, "rank": 2, "decoded_token": " Congress"},
        1: {"logprob": -9.0, "rank": 40, "decoded_token": text(1)},
    }
    assert plain["outputs"][0]["logprobs"] == [expected]
    assert plain["prompt_logprobs"] == [None, expected]
    assert plain["metrics"] == dataclasses.asdict(output().metrics or pytest.fail("no metrics"))
    assert plain["cache_counters"]["cached_tokens"] == 0
    again = json.loads(json.dumps(plain))
    assert again["outputs"][0]["logprobs"] == [{str(key): expected[key] for key in expected}]
    assert again | {"outputs": 0, "prompt_logprobs": 0} == plain | {
        "outputs": 0,
        "prompt_logprobs": 0,
    }
    as_dict = dataclasses.asdict(output())
    assert as_dict["outputs"][0]["logprobs"] == output().outputs[0].logprobs


def test_output_survives_a_pickle_and_a_copy() -> None:
    """Equal to what it was, and small: the tokenizer does not travel with it."""
    assert pickle.loads(pickle.dumps(output())) == copy.deepcopy(output()) == output()
    assert len(pickle.dumps(output())) < 2000
