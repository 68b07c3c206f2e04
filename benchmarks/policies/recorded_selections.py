"""Recorder of the positions that the built-in model's indexers select, step by step.

Each row of a prefill selects as a decode step at its position would, so a document yields one step
per token. The best candidates below the selection are recorded too, in the order of their scores,
which the indexer computes anyway.

usage: python benchmarks/policies/recorded_selections.py [--cache FOLDER]
"""

import argparse
import dataclasses
import hashlib
import itertools
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import override
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

import glm53.model.indexer
import glm53.model.steps
from benchmarks.common.sequences import float32_geometry, open_sequences
from glm53 import chat
from glm53.checkpoint import load_hugging_face
from glm53.model.config import GLMConfig
from glm53.model.forward import Forward, Selection
from glm53.model.layer_plan import LayerIndex
from glm53.model.sharding import make_mesh
from glm53.model.steps import PrefillBatch, Steps
from glm53.tokenizer import Tokenizer
from kvcache import KVStore
from kvcache.device.resolve import ScoreSummary
from pallas_kernels.select_topk import select_topk
from serving.options.engine_options import model_path

CACHE = Path(__file__).parents[2] / ".cache" / "selections"
CANDIDATES = 512  # recorded of each step, best score first; the model selects the first 64
FIRST_TEXT_POSITION = 4096
LAST_TEXT_POSITION = 8192
WARM_UP_STEPS = 512  # steps before the first question
ANSWER_TOKENS = 20
TEXT_WARM_UP = 1024
# Newest rows, which are on the device anyway: the same share of the 64 selected as a page of 64
# rows is of 2048.
RESIDENT = 2
ROWS = 512  # of a prefill step
QUESTION_ROWS = 64  # of the prefill step of a question
_BUCKET = 8192  # a document, its question and the answer fit in a multiple of it


@dataclasses.dataclass(frozen=True)
class Selections:
    """Selections looked up in several caches, step by step.

    Attributes:
        ranked: int [caches, steps, candidates], positions by descending score, -1 for none.
        scores: float [caches, steps, candidates].
        top_k: number of candidates selected, the first of `ranked`.
        warm_up: number of first steps that are not counted.
    """

    ranked: np.ndarray
    scores: np.ndarray
    top_k: int
    warm_up: int

    @property
    def num_positions(self) -> int:
        """One more than the highest position."""
        return int(self.ranked.max()) + 1


@dataclasses.dataclass(frozen=True)
class RankedSteps:
    """Candidates with the best scores of each step, in descending order.

    Attributes:
        positions: int16 [groups, steps, candidates], -1 for none.
        scores: float16 [groups, steps, candidates], -inf for none.
    """

    positions: np.ndarray
    scores: np.ndarray

    @classmethod
    def join(cls, parts: Sequence["RankedSteps"]) -> "RankedSteps":
        """Concatenates the steps of all parts."""
        return cls(
            np.concatenate([part.positions for part in parts], axis=1),
            np.concatenate([part.scores for part in parts], axis=1),
        )

    def pad(self, num_steps: int) -> "RankedSteps":
        """Appends steps that select nothing."""
        widths = ((0, 0), (0, num_steps - self.positions.shape[1]), (0, 0))
        return RankedSteps(
            np.pad(self.positions, widths, constant_values=-1),
            np.pad(self.scores, widths),
        )

    def __getitem__(self, steps: slice) -> "RankedSteps":
        return RankedSteps(self.positions[:, steps], self.scores[:, steps])


@dataclasses.dataclass(frozen=True)
class Recording:
    """Selections in one document and in the questions after it.

    Attributes:
        text: the document's steps from `FIRST_TEXT_POSITION` to `LAST_TEXT_POSITION`.
        warm_up: the document's last steps.
        questions: the steps of each question and its answer, each right after the document.
    """

    text: RankedSteps
    warm_up: RankedSteps
    questions: tuple[RankedSteps, ...]

    def save(self, path: Path) -> None:
        """Writes a .npz file."""
        path.parent.mkdir(parents=True, exist_ok=True)
        arrays = {}
        parts = (self.text, self.warm_up, *self.questions)
        for name, steps in zip(_part_names(), parts, strict=False):
            arrays |= {f"{name}_positions": steps.positions, f"{name}_scores": steps.scores}
        np.savez_compressed(path, **arrays)

    @classmethod
    def load(cls, path: Path) -> "Recording":
        """Reads a file written by `save`.

        Raises:
            FileNotFoundError: the file does not exist.
        """
        with np.load(path) as arrays:
            parts = [
                RankedSteps(arrays[f"{name}_positions"], arrays[f"{name}_scores"])
                for name in itertools.islice(_part_names(), len(arrays.files) // 2)
            ]
        return cls(parts[0], parts[1], tuple(parts[2:]))


def _part_names() -> Iterator[str]:
    yield from ("text", "warm_up")
    yield from (f"question_{number}" for number in itertools.count())


class _RankedForward(Forward):
    """Trunk whose trace holds candidates in order of score, then the bits of their scores."""

    @override
    def no_selection(self) -> Selection:
        nothing = jnp.full((self.positions.shape[0], 2 * CANDIDATES), -1, jnp.int32)
        return dataclasses.replace(super().no_selection(), positions=nothing)

    @override
    def select(
        self,
        index: LayerIndex,
        store: KVStore,
        query: Float[Array, "tokens heads width"],
        head_weights: Float[Array, "tokens heads"],
    ) -> tuple[Int[Array, "tokens k"], ScoreSummary]:
        candidates = []

        def rank(
            scores: jax.Array,
            positions: jax.Array,
            first: int,
            last: jax.Array,
            k: int,
            ordered: bool,
        ) -> tuple[jax.Array, jax.Array]:
            best, ranked = select_topk(scores, positions, first, last, CANDIDATES)
            bits = jax.lax.bitcast_convert_type(best, jnp.int32)
            candidates.append(jnp.concatenate([ranked, bits], axis=1))
            return select_topk(scores, positions, first, last, k, ordered)

        with mock.patch.object(glm53.model.indexer, "select_topk", rank):
            selected = super().select(index, store, query, head_weights)
        (self._candidates,) = candidates
        return selected

    @override
    def resolve(
        self,
        index: LayerIndex,
        store: KVStore,
        positions: Int[Array, "tokens k"],
        summary: ScoreSummary,
    ) -> tuple[KVStore, Selection]:
        store, selection = super().resolve(index, store, positions, summary)
        return store, dataclasses.replace(selection, positions=self._candidates)


class Recorder:
    """Recorder of the positions that full layers select for one sequence of the built-in model.

    Args:
        num_tokens: maximum length of the sequence.
    """

    def __init__(self, num_tokens: int) -> None:
        path = model_path("tiny")
        self.config = GLMConfig.from_pretrained(path).replace(compute_dtype="float32")
        self.tokenizer = Tokenizer.from_dir(path)
        self._params = load_hugging_face(path, self.config, make_mesh())
        geometry = float32_geometry(self.config, 1, num_tokens)
        self._steps = Steps(self.config, geometry, make_mesh())
        self._store, self._sequences = open_sequences(self._steps)
        types = self.config.indexer_types[: self.config.num_hidden_layers]
        self._full_layers = np.flatnonzero(np.asarray(types) == "full")

    def record(self, document: dict) -> Recording:
        """Prefills a document, then answers each of its questions.

        Args:
            document: a line of the model's needles.jsonl.
        """
        prompts = [self.prompt(document, item["question"]) for item in document["questions"]]
        shared = _common_prefix(prompts)
        self._go_to(0)
        document_ids = prompts[0][:shared]
        read = RankedSteps.join(
            [self._append(document_ids[at : at + ROWS], ROWS)[0] for at in range(0, shared, ROWS)]
        )
        questions = []
        for prompt in prompts:
            self._go_to(shared)
            questions.append(self._answer(prompt[shared:]))
        text = read[FIRST_TEXT_POSITION:LAST_TEXT_POSITION]
        return Recording(text, read[-WARM_UP_STEPS:], tuple(questions))

    def prompt(self, document: dict, question: str) -> np.ndarray:
        """Returns the token ids of a document and a question, up to the answer."""
        message = {"role": "user", "content": f"{document['text']}\n{question}"}
        text = chat.render([message], add_generation_prompt=True)
        return np.asarray(self.tokenizer.encode(text))

    def _answer(self, question: np.ndarray) -> RankedSteps:
        """Returns the steps of a question and its greedy answer.

        Raises:
            ValueError: the question has more than `QUESTION_ROWS` tokens.
        """
        if len(question) > QUESTION_ROWS:
            raise ValueError(
                f"a question of {len(question)} tokens is longer than QUESTION_ROWS {QUESTION_ROWS}"
            )
        steps, token = self._append(question, QUESTION_ROWS)
        parts = [steps]
        for _ in range(ANSWER_TOKENS):
            steps, token = self._append(np.asarray([token]), 1)
            parts.append(steps)
        return RankedSteps.join(parts)

    def _go_to(self, length: int) -> None:
        """Cuts the sequence to its first `length` tokens."""
        lengths = jnp.full_like(self._sequences.length, length)
        self._sequences = dataclasses.replace(self._sequences, length=lengths)

    def _append(self, ids: np.ndarray, rows: int) -> tuple[RankedSteps, int]:
        """Appends `ids` in one step of `rows` rows; returns their steps and the token that
        follows."""
        padded = np.zeros((1, rows), np.int32)
        padded[0, : len(ids)] = ids
        batch = PrefillBatch(
            jnp.zeros(1, jnp.int32), jnp.full(1, len(ids), jnp.int32), jnp.asarray(padded)
        )
        with mock.patch.object(glm53.model.steps, "Forward", _RankedForward):
            output, self._store, self._sequences = self._steps.prefill(
                self._params,
                self._store,
                self._sequences,
                batch,
                context_pages=self._steps.geometry.max_pages_per_sequence,
                trace=True,
            )
        assert output.trace is not None
        traced = np.asarray(output.trace.selected)[self._full_layers, : len(ids)]
        positions, score_bits = np.split(traced, 2, axis=2)
        scores = np.ascontiguousarray(score_bits).view(np.float32)
        steps = RankedSteps(positions.astype(np.int16), scores.astype(np.float16))
        return steps, int(output.next_token[0])


def _common_prefix(prompts: list[np.ndarray]) -> int:
    """Returns the number of leading tokens that all prompts share."""
    min_tokens = min(map(len, prompts))
    together = np.stack([prompt[:min_tokens] for prompt in prompts])
    differs = (together != together[0]).any(axis=0)
    return int(np.argmax(differs)) if differs.any() else min_tokens


def documents(min_tokens: int) -> list[dict]:
    """Returns the model's documents of at least `min_tokens` tokens."""
    lines = (model_path("tiny") / "needles.jsonl").read_text(encoding="utf-8").splitlines()
    return [doc for doc in map(json.loads, lines) if doc["context_tokens"] >= min_tokens]


def load_or_record(cache: Path = CACHE) -> dict[str, Recording]:
    """Returns the recordings of all documents of 8K tokens and more, making those not in the
    cache."""
    wanted = documents(min_tokens=_BUCKET // 2)
    files = {doc["id"]: cache / recording_name(doc) for doc in wanted}
    missing = [doc for doc in wanted if not files[doc["id"]].is_file()]
    sizes = [-(-doc["context_tokens"] // _BUCKET) * _BUCKET for doc in missing]
    for size in sorted(set(sizes)):
        recorder = Recorder(num_tokens=size)
        for document in (doc for doc, own in zip(missing, sizes, strict=True) if own == size):
            recorder.record(document).save(files[document["id"]])
    return {name: Recording.load(file) for name, file in files.items()}


def recording_name(document: dict) -> str:
    """Returns the file name of a recording, which depends on model, text and selection."""
    choice = (CANDIDATES, FIRST_TEXT_POSITION, LAST_TEXT_POSITION, WARM_UP_STEPS, ANSWER_TOKENS)
    digest = hashlib.sha256(json.dumps([document, choice], sort_keys=True).encode())
    for file in ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"):
        digest.update((model_path("tiny") / file).read_bytes())
    return f"{document['id']}-{digest.hexdigest()[:16]}.npz"


def text_selections(recordings: Sequence[Recording]) -> Selections:
    """Returns the selections of reading through each document, counted after `TEXT_WARM_UP`
    steps."""
    min_tokens = min(recording.text.positions.shape[1] for recording in recordings)
    return _lookups([recording.text[:min_tokens] for recording in recordings], TEXT_WARM_UP)


def needle_selections(recordings: Sequence[Recording]) -> Selections:
    """Returns the selections of each question and answer, with caches warm from the document's
    end."""
    asked = [
        RankedSteps.join([recording.warm_up, question])
        for recording in recordings
        for question in recording.questions
    ]
    longest = max(steps.positions.shape[1] for steps in asked)
    return _lookups([steps.pad(longest) for steps in asked], WARM_UP_STEPS)


def _lookups(parts: Sequence[RankedSteps], warm_up: int) -> Selections:
    """Returns one cache for each index group of each part, without lookups of the newest rows."""
    positions = np.concatenate([part.positions for part in parts])
    scores = np.concatenate([part.scores for part in parts])
    top_k = GLMConfig.from_pretrained(model_path("tiny")).index_topk
    newest = positions[:, :, :top_k].max(axis=2, keepdims=True)
    return Selections(
        np.where(positions > newest - RESIDENT, -1, positions), scores, top_k, warm_up
    )


def main() -> None:
    """Records the documents that are not yet in the cache."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cache", type=Path, default=CACHE, help="directory of the .npz files")
    options = parser.parse_args()
    for name, recording in load_or_record(options.cache).items():
        steps, questions = recording.text.positions.shape[1], len(recording.questions)
        print(f"{name}: {steps} steps of text, {questions} questions")


if __name__ == "__main__":
    main()
