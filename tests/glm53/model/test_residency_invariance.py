"""Invariance of answers, bit for bit, to where rows lie.

Random histories of sequences that share prefixes, with pages moved between the tiers at will, in a
store that holds a fraction of them on the device: each step's logits and selections, and every
stored row, are those of one whole prefill in a store that never moves a page.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

from pallas_kernels.common.row_format import RowKind
from tests.glm53.model.residency_histories import (
    DECODE_ROWS,
    LENGTH,
    PREFILL_ROWS,
    Running,
    make_histories,
    streams,
)
from tests.helpers.random_models import micro_config, preset_params

pytestmark = pytest.mark.compiles

HAPPENS = (
    "rows in a row cache",
    "refused",
    "imports",
    "import refused",
    "exports",
    "whole pages found",
    "part of a page found",
    "resident in prefill",
    "staged in prefill",
    "host in prefill",
    "resident in decode",
    "row_cache in decode",
    "staged in decode",
    "host in decode",
    "only on the host",
    "in both tiers",
    "three different numbers",
    "onloaded ahead",
    "onloaded",
    "evicted",
    "leases revoked",
    "preempted",
)


@pytest.mark.parametrize(
    ("row_kind", "num_devices"),
    [
        ("float32", 1),
        ("float32", 2),
        ("bfloat16", 1),
        ("fp8", 2),
    ],
)
def test_residency_changes_no_bit(row_kind: RowKind, num_devices: int) -> None:
    """A stale or misplaced row, an order that depends on the tier, a page mapped too late."""
    histories = make_histories(row_kind, num_devices)
    history = histories()
    history.walk()
    history.teardown()
    missing = [name for name in HAPPENS if histories.counts[name] == 0]
    assert not missing, f"the history had not: {', '.join(missing)}"
    histories.counts.clear()
    examples = 32 if num_devices == 1 else 64
    run_state_machine_as_test(
        histories, settings=settings(max_examples=examples, stateful_step_count=70)
    )
    assert histories.counts["steps"] > 150
    assert sum(histories.counts[name] > 0 for name in HAPPENS) > len(HAPPENS) // 2


@pytest.mark.parametrize("zeroed", ["weights_proj", "wq_b"])
def test_equal_scores(zeroed: str) -> None:
    """Equal index scores, zeros of either sign, that are ranked by where their rows lie."""

    def change(path: tuple, leaf: jax.Array) -> jax.Array:
        name = jax.tree_util.keystr(path)
        return jnp.zeros_like(leaf) if "indexer" in name and zeroed in name else leaf

    params = jax.tree_util.tree_map_with_path(change, preset_params(micro_config(), 1))
    histories = make_histories("float32", 1, params)
    first = np.arange(micro_config().index_topk)
    assert np.all(histories.expected.selected[:, :, len(first) :] == first)
    history = histories()
    prompt = LENGTH - 20
    history.cache.open(0, streams()[0][:prompt].tolist(), LENGTH)
    history.running[0] = Running(0, prompt, LENGTH, 0, True)
    while (run := history.running[0]).done < LENGTH:
        if run.done < prompt:
            history.step({0: min(PREFILL_ROWS, prompt - run.done)}, [0], PREFILL_ROWS)
        else:
            history.step({0: min(5, LENGTH - run.done)}, [-1, 0], DECODE_ROWS)
    history.teardown()
    assert histories.counts["host in decode"] and histories.counts["row_cache in decode"]
