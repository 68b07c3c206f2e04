import functools

import jax
import pytest
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from glm53.model.sharding import make_mesh
from pallas_kernels.select_topk import merge_topk, select_topk
from pallas_kernels.select_topk.specs import SPECS
from scripts.aot.aot import compile_for_h200

ONE = NamedSharding(make_mesh(1), PartitionSpec())


def on_device(shapes: tuple[jax.ShapeDtypeStruct, ...]) -> list[jax.ShapeDtypeStruct]:
    return [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=ONE) for x in shapes]


@pytest.mark.parametrize(("name", "rounds"), [("glm_1m", 3), ("glm_128k_batch", 2)])
def test_selection(name: str, rounds: int) -> None:
    """A row kept in more registers than there are, a copy of the scores, a launch too many."""
    spec = SPECS[name]
    step = functools.partial(
        select_topk, first=0, k=spec.k, ordered=False, implementation="mosaic_gpu"
    )
    report = compile_for_h200(
        lambda scores, positions, last: step(scores, positions, last=last),
        on_device(spec.shapes),
    )
    assert report.copies == []
    for kernel in report.kernels:
        assert kernel.spilled_bytes == 0
        # Two blocks to a multiprocessor.
        assert kernel.registers <= 240
        assert kernel.shared_bytes <= 36 << 10
    assert report.launch_counts == {"select_topk": rounds}
    # Never all of the scores again.
    assert report.temp_bytes < 4 * spec.num_rows * spec.context


def test_merge() -> None:
    """A kernel that spills, a merge that takes more than one launch, or one that first puts in
    order what the devices gathered."""
    spec, mesh = SPECS["glm_1m_drafts"], make_mesh(8)
    by_device = NamedSharding(mesh, PartitionSpec("model"))

    def step(scores: jax.Array, positions: jax.Array) -> jax.Array:
        scores, positions = (lax.all_gather(x[0], "model") for x in (scores, positions))
        shard = lax.axis_index("model")
        return merge_topk(scores, positions, shard, implementation="mosaic_gpu")[None]

    report = compile_for_h200(
        jax.shard_map(
            step,
            mesh=mesh,
            in_specs=by_device.spec,
            out_specs=by_device.spec,
            check_vma=False,
        ),
        [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=by_device) for x in spec.merge_shapes],
    )
    assert report.copies == []
    (kernel,) = report.kernels
    assert kernel.spilled_bytes == 0
    assert kernel.registers <= 240
    assert kernel.shared_bytes <= 12 << 10
    # The shard's number takes two.
    launches = {"all-gather": 1, "merge_topk": 1, "partition-id": 1, "fusion": 1}
    assert report.launch_counts == launches
