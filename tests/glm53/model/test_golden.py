"""Logits, hidden states, selections, continuations and drafts against recorded ones.

The records come from independent implementations: Hugging Face transformers for the trunk, a
float64 NumPy forward pass for the MTP layer.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec

from glm53.checkpoint import load_hugging_face
from glm53.model.config import GLMConfig
from glm53.model.mtp import MTPLayer
from glm53.model.sharding import make_mesh
from glm53.model.step_batch import StepBatch
from glm53.model.steps import compiled_steps
from kvcache import KVStore
from pallas_kernels.common.row_format import RowKind
from pallas_kernels.common.row_tiles import map_row_tiles
from tests.helpers.golden import GOLDEN, golden_arrays, golden_config, golden_params
from tests.helpers.session import Session

pytestmark = pytest.mark.compiles
LOGITS_ATOL = 2e-4
HIDDEN_ATOL = 5e-4
ROWS = 320  # one compiled prefill step for every prompt, always traced: each takes seconds

TRUNK = [("tiny_f32", "p0"), ("tiny_f32", "p1"), ("tiny_fp8", "p0"), ("tiny_mtp", "p0")]
DRAFTS = [("tiny_fp8", "d0"), ("tiny_mtp", "d0"), ("tiny_mtp", "d1"), ("tiny_mtp", "d2")]


def session(kit: str, num_devices: int = 1, config: GLMConfig | None = None, **options) -> Session:
    config = config or golden_config(kit)
    with_mtp = config.num_nextn_predict_layers > 0
    params = golden_params(kit, num_devices)
    return Session(config, params, num_devices=num_devices, with_mtp=with_mtp, **options)


def greedy(session: Session, slot: int, first: int, count: int) -> list[int]:
    tokens = [first]
    while len(tokens) < count:
        tokens.append(int(session.decode(slot).next_token[0]))
    return tokens


def check_trunk(kit: str, prompt: str, num_devices: int) -> None:
    """Every position's logits, each full layer's selection, and 32 greedy tokens."""
    golden, config = golden_arrays(kit), golden_config(kit)
    ids = golden[f"{prompt}_ids"]
    run = session(kit, num_devices)
    run.open(2, len(ids) + 32)
    output = run.append({2: ids}, rows=ROWS, trace=True)
    logits = np.asarray(output.logits)[0, : len(ids)]
    np.testing.assert_allclose(logits, golden[f"{prompt}_e5_logits"], rtol=0, atol=LOGITS_ATOL)
    full = [layer for layer, kind in enumerate(config.indexer_types) if kind == "full"]
    assert output.trace is not None
    selected = np.asarray(output.trace.selected)[full, : len(ids)]
    np.testing.assert_array_equal(selected, golden[f"{prompt}_e5_topk"])
    tokens = greedy(run, 2, int(output.next_token[0]), 32)
    assert tokens == golden[f"{prompt}_e5_greedy"].tolist()


@pytest.mark.parametrize(("kit", "prompt"), TRUNK)
def test_trunk(kit: str, prompt: str) -> None:
    """Logits, selections and tokens on one device."""
    check_trunk(kit, prompt, 1)


def test_hidden_states() -> None:
    """The hidden state after each layer, and after the final norm as the MTP layer would see it."""
    golden = golden_arrays("tiny_f32")
    ids = golden["p0_ids"]
    run = session("tiny_f32")
    run.open(0, len(ids))
    output = run.append({0: ids}, rows=ROWS, trace=True)
    assert output.trace is not None
    hidden = np.asarray(output.trace.hidden)[:, : len(ids)]
    expected = golden["p0_e5_hidden"]
    np.testing.assert_allclose(hidden, expected[:-1], rtol=0, atol=HIDDEN_ATOL)
    last = np.asarray(run.sequences.last_hidden)[0]
    np.testing.assert_allclose(last, expected[-1, -1], rtol=0, atol=HIDDEN_ATOL)


def test_latent_norm_eps() -> None:
    """The latent norms' epsilon of Hugging Face transformers, 1e-6."""
    golden = golden_arrays("tiny_f32")
    run = session("tiny_f32", config=golden_config("tiny_f32").replace(latent_norm_eps=1e-6))
    ids = golden["p0_ids"]
    run.open(0, len(ids))
    logits = np.asarray(run.append({0: ids}, rows=ROWS).logits)[0, : len(ids)]
    np.testing.assert_allclose(logits, golden["p0_e6_logits"], rtol=0, atol=LOGITS_ATOL)


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize(("kit", "prompt"), DRAFTS)
def test_drafts(kit: str, prompt: str, share: bool) -> None:
    """Three draft steps, with the first one's selection shared and with the indexer run anew."""
    golden = golden_arrays(kit)
    name = f"{prompt}_e5_{'share' if share else 'noshare'}"
    ids = golden[f"{prompt}_ids"]
    run = session(kit)
    run.open(1, len(ids) + 4)
    output = run.append({1: ids}, rows=ROWS, trace=True)
    assert int(output.next_token[0]) == golden[f"{prompt}_e5_next"]
    # Only drafts depend on it: prompts are computed by one program for both.
    config = golden_config(kit).replace(index_share_for_mtp_iteration=share)
    run.steps = compiled_steps(config, run.geometry, run.steps.mesh)
    drafts = run.draft(1, -1, num_drafts=3)
    assert drafts.token_ids[0].tolist() == golden[f"{name}_tokens"].tolist()
    np.testing.assert_allclose(
        np.asarray(drafts.logits)[0], golden[f"{name}_logits"], rtol=0, atol=LOGITS_ATOL
    )
    # The row of position p lies in slot p + 1.
    slots = np.asarray(drafts.selected)[0]
    expected = golden[f"{prompt}_e5_sel"]
    np.testing.assert_array_equal(slots[slots >= 0] - 1, expected[expected >= 0])


def test_drafts_do_not_disturb_the_trunk() -> None:
    """Greedy tokens stay the same when drafts are made, and ignored, before each of them."""
    golden = golden_arrays("tiny_mtp")
    ids = golden["p0_ids"]
    run = session("tiny_mtp")
    run.open(1, len(ids) + 32)
    tokens = [int(run.append({1: ids}, rows=ROWS, trace=True).next_token[0])]
    while len(tokens) < 8:
        run.draft(1, -1, num_drafts=3)
        tokens.append(int(run.decode(1).next_token[0]))
    assert tokens == golden["p0_e5_greedy"][:8].tolist()


def test_drafts_after_decode() -> None:
    """Drafts after decoded tokens equal drafts after the same tokens as a prompt, bit for bit."""
    ids = golden_arrays("tiny_mtp")["d1_ids"]
    whole, stepped = session("tiny_mtp"), session("tiny_mtp")
    for run in (whole, stepped):
        run.open(1, len(ids) + 8)
    whole.append({1: ids}, rows=ROWS, trace=True)
    stepped.append({1: ids[:-3]}, rows=ROWS, trace=True)
    for token in ids[-3:]:
        stepped.set_last_token(1, int(token))
        stepped.decode(1)
    np.testing.assert_array_equal(
        np.asarray(whole.draft(1, -1, num_drafts=3).logits)[0],
        np.asarray(stepped.draft(1, -1, num_drafts=3).logits)[0],
    )


@pytest.mark.parametrize(
    ("kit", "prompt"), [pytest.param("tiny_fp8", "d0", marks=pytest.mark.slow), ("tiny_mtp", "d1")]
)
def test_first_draft_step_at_every_position(kit: str, prompt: str) -> None:
    """Teacher-forced logits of the MTP layer: the row of position p sees tokens 0..p + 1."""
    golden = golden_arrays(kit)
    ids, expected = golden[f"{prompt}_ids"], golden[f"{prompt}_e5_step1"]
    run = session(kit)
    run.open(0, len(ids) + 1)
    output = run.append({0: ids}, rows=ROWS, trace=True)
    assert output.trace is not None

    def every_position(params, store, table, tokens, hidden):
        model = nnx.merge(run.steps.graph, params)
        hidden = map_row_tiles(model.norm.bind(), hidden)
        positions = jnp.arange(1, len(ids) + 1)[None]
        batch = StepBatch(positions, jnp.zeros(1, jnp.int32), table)
        mtp = MTPLayer(model, run.config, run.geometry, batch)
        outputs, _, _ = mtp.run(store, tokens, hidden)
        return mtp.forward.logits(outputs)

    everywhere = PartitionSpec()
    logits = jax.jit(
        jax.shard_map(
            every_position,
            mesh=run.steps.mesh,
            in_specs=(run.steps.param_specs, KVStore.specs(run.geometry), *[everywhere] * 3),
            out_specs=everywhere,
            check_vma=False,
        )
    )(
        run.params,
        run.store,
        run.sequences.block_table[:1],
        jnp.asarray([*ids[1:], golden[f"{prompt}_e5_next"]]),
        output.trace.hidden[-1, : len(ids)],
    )
    np.testing.assert_allclose(np.asarray(logits), expected, rtol=0, atol=LOGITS_ATOL)


@pytest.mark.parametrize(
    ("kit", "prompt", "num_devices"),
    [
        pytest.param("tiny_f32", "p0", 2, marks=pytest.mark.slow),
        pytest.param("tiny_f32", "p0", 4, marks=pytest.mark.slow),
        ("tiny_fp8", "p0", 2),
    ],
)
def test_several_devices(kit: str, prompt: str, num_devices: int) -> None:
    """A mesh gives the same selections and tokens, also where FP8 blocks straddle devices."""
    check_trunk(kit, prompt, num_devices)


def test_drafts_on_several_devices() -> None:
    """The MTP layer's rows, one slot further, are found on the devices that own those slots."""
    golden = golden_arrays("tiny_fp8")
    ids = golden["d0_ids"]
    run = session("tiny_fp8", 2)
    run.open(1, len(ids) + 4)
    run.append({1: ids}, rows=ROWS, trace=True)
    drafts = run.draft(1, -1, num_drafts=3)
    assert drafts.token_ids[0].tolist() == golden["d0_e5_share_tokens"].tolist()


@pytest.mark.slow
@pytest.mark.parametrize("row_kind", ["bfloat16", "fp8"])
def test_narrow_rows_stay_close(row_kind: RowKind) -> None:
    """Rounded rows move the typical logit little, and most selections not at all."""
    golden, config = golden_arrays("tiny_f32"), golden_config("tiny_f32")
    ids = golden["p0_ids"]
    run = session("tiny_f32", row_kind=row_kind)
    run.open(0, len(ids))
    output = run.append({0: ids}, rows=ROWS, trace=True)
    logits = np.asarray(output.logits)[0, : len(ids)]
    error = np.abs(logits - golden["p0_e5_logits"]).max(axis=1)
    # Rows before index_topk attend to everything, so only rounding can move them.
    assert np.median(error[: config.index_topk]) < {"bfloat16": 0.05, "fp8": 0.5}[row_kind]
    assert output.trace is not None
    first = np.asarray(output.trace.selected)[0, : len(ids)]
    same = np.mean(
        [np.isin(a, b).mean() for a, b in zip(first, golden["p0_e5_topk"][0], strict=True)]
    )
    assert same > {"bfloat16": 0.98, "fp8": 0.9}[row_kind]


def test_bfloat16_stays_close() -> None:
    """bfloat16 activations and weights: the typical logit of a row that attends to everything."""
    golden = golden_arrays("tiny_mtp")
    config = golden_config("tiny_mtp").replace(compute_dtype="bfloat16")
    params = load_hugging_face(GOLDEN / "tiny_mtp", config, make_mesh(1))
    run = Session(config, params, row_kind="bfloat16", with_mtp=True)
    ids = golden["p0_ids"]
    run.open(0, len(ids))
    logits = np.asarray(run.append({0: ids}, rows=ROWS).logits)[0, : config.index_topk]
    error = np.abs(logits - golden["p0_e5_logits"][: config.index_topk]).max(axis=1)
    assert np.median(error) < 0.2


def test_activation_quantization() -> None:
    """Inputs of FP8 matrices rounded to e4m3: close to unrounded, but not equal."""
    golden = golden_arrays("tiny_fp8")
    config = golden_config("tiny_fp8").replace(activation_quantization="fp8_1x128")
    run = session("tiny_fp8", config=config)
    ids = golden["p0_ids"]
    run.open(0, len(ids))
    logits = np.asarray(run.append({0: ids}, rows=ROWS).logits)[0, : config.index_topk]
    error = logits - golden["p0_e5_logits"][: config.index_topk]
    # Logits vary by 1; unrelated ones would differ by 1.4.
    assert 1e-3 < np.sqrt(np.mean(error**2)) < 0.4
