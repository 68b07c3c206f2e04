"""A row's bits do not depend on its neighbours.

However a sequence is cut into chunks, decoded, padded, and batched with others, each position's
logits are the same bits as in one prefill of the whole sequence.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from glm53.model.row_tiles import ROW_TILE, map_row_tiles
from pallas_kernels.matmul import multiply
from tests.helpers.random_models import micro_config, preset_params, random_tokens
from tests.helpers.session import Session

pytestmark = pytest.mark.compiles
LENGTH = 144  # many times index_topk, and longer than a block of rows that are scored together
SLOTS = 3
ROW_BUCKETS = (16, LENGTH)
DECODE_BUCKETS = (1, 4)


def start(num_devices: int) -> Session:
    params = preset_params(micro_config(), num_devices)
    return Session(micro_config(), params, num_devices=num_devices, max_model_len=256)


class Sequences:
    """The tokens of each slot, and each position's logits from one whole prefill."""

    def __init__(self, num_devices: int) -> None:
        self.session = start(num_devices)
        self.tokens = [random_tokens(self.session.config, LENGTH, seed) for seed in range(SLOTS)]
        self.expected = []
        for tokens in self.tokens:
            whole = start(num_devices)
            whole.open(0, LENGTH)
            logits = np.asarray(whole.append({0: tokens}, rows=LENGTH).logits)[0]
            self.expected.append(logits)


@pytest.fixture(scope="module", params=[1, pytest.param(2, marks=pytest.mark.slow)])
def sequences(request: pytest.FixtureRequest) -> Sequences:
    return Sequences(request.param)


class History:
    """Random steps over the slots; each step's logits are compared as it is made."""

    def __init__(self, sequences: Sequences, data: st.DataObject) -> None:
        self.sequences, self.data = sequences, data
        self.run = start(sequences.session.geometry.num_devices)
        self.done = [0] * SLOTS
        for slot in data.draw(st.permutations(range(SLOTS)), label="order of opening"):
            self.run.open(slot, LENGTH)

    def context_pages(self, longest: int) -> int:
        """Half a block table if that holds everything, or all of it."""
        pages = self.run.geometry.max_pages_per_sequence
        half = longest <= pages // 2 * self.run.geometry.rows_per_page
        return pages // 2 if half else pages

    def prefill(self) -> None:
        """Appends a chunk of one sequence, or of several at once."""
        rows = self.data.draw(st.sampled_from(ROW_BUCKETS), label="bucket")
        groups = 1 if rows == ROW_BUCKETS[1] else SLOTS
        chunks = {}
        for slot in self.data.draw(st.permutations(range(SLOTS)), label="slots")[:groups]:
            left = LENGTH - self.done[slot]
            if left:
                count = self.data.draw(st.integers(1, min(rows, left)), label="chunk")
                chunks[slot] = self.sequences.tokens[slot][self.done[slot] :][:count]
        if not chunks:
            return
        longest = max(self.done[slot] + len(ids) for slot, ids in chunks.items())
        pages = self.context_pages(longest) if groups == 1 else None
        output = self.run.append(chunks, rows=rows, groups=groups, context_pages=pages)
        for group, (slot, ids) in enumerate(chunks.items()):
            self.check(slot, np.asarray(output.logits)[group, : len(ids)])

    def decode(self) -> None:
        """Appends one token to some sequences, at random places of the batch."""
        size = self.data.draw(st.sampled_from(DECODE_BUCKETS), label="decode bucket")
        batch = [slot for slot in range(SLOTS) if self.done[slot] < LENGTH] + [-1] * size
        batch = self.data.draw(st.permutations(batch), label="batch")[:size]
        slots = [slot for slot in batch if slot >= 0]
        if not slots:
            return
        for slot in slots:
            token = self.sequences.tokens[slot][self.done[slot]]
            self.run.set_last_token(slot, int(token))
        output = self.run.decode(*batch)
        for group, slot in enumerate(batch):
            if slot >= 0:
                self.check(slot, np.asarray(output.logits)[group : group + 1])

    def check(self, slot: int, logits: np.ndarray) -> None:
        start = self.done[slot]
        self.done[slot] += len(logits)
        expected = self.sequences.expected[slot][start : self.done[slot]]
        np.testing.assert_array_equal(logits, expected, err_msg=f"slot {slot} from {start}")


@settings(max_examples=12)
@given(data=st.data())
def test_any_history_gives_the_bits_of_one_prefill(
    sequences: Sequences, data: st.DataObject
) -> None:
    """Uneven chunks, decode steps, padding, other sequences and buckets change no bit."""
    history = History(sequences, data)
    for _ in range(16):
        data.draw(st.sampled_from([history.prefill, history.decode]), label="step")()
    history.run.pool.check_integrity()


def test_several_key_blocks() -> None:
    """The same where the context spans several blocks of index keys."""
    config, params = micro_config(), preset_params(micro_config(), 1)
    tokens = random_tokens(config, 1200, seed=7)
    options: dict[str, Any] = {"rows_per_device": 64, "max_model_len": 2048, "max_sequences": 2}
    whole, chunked = Session(config, params, **options), Session(config, params, **options)
    whole.open(0, len(tokens))
    expected = np.asarray(whole.append({0: tokens}, rows=1216).logits)[0]
    chunked.open(1, len(tokens))
    start = 0
    for count in (500, 31, 512, 150):
        ids = tokens[start : start + count]
        logits = np.asarray(chunked.append({1: ids}, rows=512).logits)[0, : len(ids)]
        np.testing.assert_array_equal(logits, expected[start : start + count])
        start += count
    for position in range(start, len(tokens)):
        chunked.set_last_token(1, int(tokens[position]))
        logits = np.asarray(chunked.decode(1).logits)[0]
        np.testing.assert_array_equal(logits, expected[position])


@pytest.mark.parametrize("num_rows", [1, 2, 7, 8, 9, 33, 100])
def test_row_tiles(num_rows: int) -> None:
    """A product over tiles gives each row the bits that it has alone."""
    rng = np.random.default_rng(num_rows)
    rows = rng.standard_normal((num_rows, 96), np.float32)
    matrix = jnp.asarray(rng.standard_normal((160, 96), np.float32))
    product = jax.jit(lambda rows: map_row_tiles(lambda tile: multiply(tile, matrix), rows))
    together = product(rows)
    alone = [product(row[None])[0] for row in rows]
    np.testing.assert_array_equal(np.asarray(together), np.stack(alone))
    np.testing.assert_allclose(np.asarray(together), rows @ matrix.T, rtol=1e-4, atol=1e-4)


def test_row_tiles_see_whole_tiles_only() -> None:
    """The function never sees another number of rows than a tile's."""
    seen = set()

    def record(tile):
        seen.add(tile.shape)
        return tile

    for num_rows in (1, 8, 20):
        map_row_tiles(record, jnp.ones((num_rows, 3)))
    assert seen == {(ROW_TILE, 3)}
