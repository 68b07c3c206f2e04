"""Drafts of a sequence that continues cached pages, whose last hidden state nobody kept."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest

from glm53.model.config import GLMConfig
from glm53.model.presets import preset
from kvcache.tiers.page_states import PageState
from tests.helpers.cached_session import CachedSession, as_bytes, page_rows
from tests.helpers.random_models import preset_params, random_tokens

pytestmark = pytest.mark.compiles
PAGE = 8
CACHED, LENGTH = 3 * PAGE + 5, 5 * PAGE
ROWS, DRAFTS = 16, 3


@functools.cache
def config() -> GLMConfig:
    return preset("test-small").replace(
        compute_dtype="float32",
        num_hidden_layers=2,
        indexer_types=("full", "shared"),
        mlp_layer_types=("dense", "sparse"),
        num_nextn_predict_layers=1,
        n_routed_experts=4,
        index_topk=10,
    )


@functools.cache
def tokens() -> np.ndarray:
    return random_tokens(config(), LENGTH, seed=1)


def session() -> CachedSession:
    """One whose cache holds the first tokens of `tokens`, computed by a sequence that has ended,
    and pages of others in which the last of them is another."""
    session = CachedSession(
        config(),
        preset_params(config(), 1),
        max_step_rows=ROWS,
        row_kind="float32",
        rows_per_device=PAGE,
        device_pages=24,
        host_pages=64,
        row_cache_rows=PAGE,
        staging_pages=1,
        max_sequences=2,
        max_model_len=LENGTH,
        with_mtp=True,
        with_hidden=True,
    )
    for common in range(2 * PAGE, CACHED):
        other = random_tokens(config(), CACHED, seed=common)
        run(session, 0, np.concatenate([tokens()[:common], other[: CACHED - common]]))
        session.cache.close(0)
    run(session, 0, tokens()[:CACHED])
    session.cache.close(0)
    return session


def run(
    session: CachedSession, slot: int, prompt: np.ndarray, use_prefix: bool = True
) -> tuple[int, bytes, np.ndarray]:
    """Computes a prompt. Returns how much of it was cached, the drafts' logits, and MTP rows."""
    cache, device = session.cache, session.cache.device
    found = cache.open(slot, prompt.tolist(), LENGTH, use_prefix=use_prefix)
    for start in range(found, len(prompt), ROWS):
        chunk = prompt[start : start + ROWS]
        complete = start + len(chunk) == len(prompt)
        session.append({slot: chunk}, rows=ROWS, staging=True, complete=complete)
    cache.prepare({slot: DRAFTS})
    drafts = device.run(
        lambda store, sequences: session.steps.draft(
            session.params,
            store,
            sequences,
            jnp.array([slot], jnp.int32),
            context_pages=session.geometry.max_pages_per_sequence,
            num_drafts=DRAFTS,
        )
    )
    cache.check_integrity()
    store, pages = device.store, np.array(cache.pages_of(slot))
    assert store.host is not None
    rows = page_rows(session.geometry, len(prompt))
    pages = pages[np.arange(len(prompt)) // PAGE]
    indices = np.array(store.device_page_index)[pages]
    on_device = as_bytes(store.slab)[-1, indices, rows]
    in_host = as_bytes(store.host.slab)[np.array(store.host_page_index)[pages], rows, -1]
    stored = np.where((indices >= 0)[:, None], on_device, in_host)
    # Position 0 has no token before it.
    return found, as_bytes(drafts.logits).tobytes(), stored[1:]


@pytest.mark.parametrize("spilled", [False, True])
@pytest.mark.parametrize(
    ("length", "found"),
    [
        (2, 0),
        (PAGE, PAGE - 2),
        (PAGE + 1, PAGE - 1),
        (PAGE + 2, PAGE - 1),
        (2 * PAGE + 1, 2 * PAGE - 1),
        (CACHED - 1, CACHED - 3),
        (CACHED + 2, CACHED - 1),
        (LENGTH - DRAFTS, CACHED - 1),
    ],
)
def test_drafts_after_a_cached_prefix(length: int, found: int, spilled: bool) -> None:
    """A row of the MTP layer made from the hidden state of another sequence, or not made at all,
    or copied from a page that ends in another token."""
    case = session()
    cache = case.cache
    if spilled:
        for page in cache.residency.states.droppable_in(PageState.DIRTY).tolist():
            cache.residency.offload(page)
        for page in cache.residency.states.droppable_in(PageState.CLEAN).tolist():
            cache.residency.drop(page)
    expected = run(case, 0, tokens()[:length], use_prefix=False)
    assert expected[0] == 0
    given = run(case, 1, tokens()[:length])
    for slot in (0, 1):
        cache.close(slot)
    assert given[0] == found
    assert given[1] == expected[1], "the drafts differ"
    np.testing.assert_array_equal(given[2], expected[2])
