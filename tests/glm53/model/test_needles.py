"""The trained model finds facts planted up to 8K tokens back, and only through its indexer."""

import dataclasses
import json

import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array

from glm53 import chat
from glm53.checkpoint import load_hugging_face
from glm53.model.config import GLMConfig
from glm53.model.forward import Forward
from glm53.model.sharding import make_mesh
from glm53.tokenizer import Tokenizer
from serving.options.engine_options import model_path
from tests.helpers.session import Session

pytestmark = pytest.mark.compiles
MODEL = model_path("tiny")
ROWS = 512
ANSWER_TOKENS = 20


class Reader:
    """Answers questions about documents; a document is read once for all its questions."""

    def __init__(self) -> None:
        self.config = GLMConfig.from_pretrained(MODEL).replace(compute_dtype="float32")
        self.tokenizer = Tokenizer.from_dir(MODEL)
        self.params = load_hugging_face(MODEL, self.config, make_mesh())
        lines = (MODEL / "needles.jsonl").read_text(encoding="utf-8").splitlines()
        self.documents = [json.loads(line) for line in lines]

    def rate(self, prefix: str, most: int) -> float:
        """Share of the questions about documents of one size that are answered exactly."""
        documents = [doc for doc in self.documents if doc["id"].startswith(prefix)][:most]
        right = [found for document in documents for found in self.ask(document)]
        return sum(right) / len(right)

    def ask(self, document: dict) -> list[bool]:
        run = Session(
            self.config,
            self.params,
            rows_per_device=64,
            max_model_len=8192,
            max_sequences=1,
        )
        run.open(0, 8192)
        prompts = [self.prompt(document, item) for item in document["questions"]]
        shared = int(np.argmin(np.equal(*[p[: min(map(len, prompts))] for p in prompts[:2]])))
        self.append(run, prompts[0][:shared])
        return [
            item["answer"] in self.answer(run, prompt, shared)
            for item, prompt in zip(document["questions"], prompts, strict=True)
        ]

    def prompt(self, document: dict, item: dict) -> np.ndarray:
        message = {"role": "user", "content": f"{document['text']}\n{item['question']}"}
        text = chat.render([message], add_generation_prompt=True)
        return np.asarray(self.tokenizer.encode(text))

    def answer(self, run: Session, prompt: np.ndarray, shared: int) -> str:
        """Goes back to the end of the shared part; what follows it is overwritten."""
        length = run.sequences.length.at[0].set(shared)
        run.sequences = dataclasses.replace(run.sequences, length=length)
        tokens = [self.append(run, prompt[shared:])]
        while len(tokens) < ANSWER_TOKENS and tokens[-1] not in self.config.eos_token_ids:
            tokens.append(int(run.decode(0).next_token[0]))
        return self.tokenizer.decode(tokens)

    def append(self, run: Session, ids: np.ndarray) -> int:
        token = 0
        for start in range(0, len(ids), ROWS):
            output = run.append({0: ids[start : start + ROWS]}, rows=ROWS, all_logits=False)
            token = int(output.next_token[0])
        return token


@pytest.fixture(scope="module")
def reader() -> Reader:
    return Reader()


@pytest.mark.parametrize("documents", [3, pytest.param(10, marks=pytest.mark.slow)])
def test_1k(reader: Reader, documents: int) -> None:
    """At least 90% at 1K tokens, where 94% was measured of the model when it was trained."""
    assert reader.rate("1000", most=documents) >= 0.9


@pytest.mark.slow
def test_8k(reader: Reader) -> None:
    """At least 75% at 8K tokens, where 85% was measured of the model when it was trained."""
    assert reader.rate("8000", most=4) >= 0.75


def test_last_positions_instead_of_the_indexer(
    reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the last 64 positions in place of the selection no fact is found at 8K."""

    def select_last(self: Forward, *_: object) -> tuple[Array, None]:
        offsets = jnp.arange(1 - self.config.index_topk, 1)
        return jnp.maximum(self.positions[:, None] + offsets, -1), None

    monkeypatch.setattr(Forward, "select", select_last)
    # Another epsilon, too near to matter, so that steps compiled with the indexer are not reused.
    monkeypatch.setattr(reader, "config", reader.config.replace(rms_norm_eps=1.0000001e-5))
    assert reader.rate("8000", most=1) == 0
