import functools

import jax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from glm53.sharding import make_mesh
from pallas_kernels.aot import compile_for_h200
from pallas_kernels.select_topk import merge_topk, select_topk
from pallas_kernels.select_topk.specs import SPECS

ONE = NamedSharding(make_mesh(1), PartitionSpec())
FUSED = "fusion"


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
        assert kernel.shared_bytes <= 52 << 10
    # A gather follows each round, or two where XLA takes scores and positions apart.
    assert set(report.launch_counts) == {"select_topk", FUSED}
    assert report.launch_counts["select_topk"] == rounds
    assert report.launch_counts[FUSED] <= rounds + 1
    # Never all of the scores again.
    assert report.temp_bytes < 4 * spec.num_rows * spec.context


def test_merge() -> None:
    """A kernel that spills, or a merge of more launches than two rounds, transposes and a sort."""
    spec = SPECS["glm_1m"]
    step = functools.partial(merge_topk, implementation="mosaic_gpu")
    report = compile_for_h200(step, on_device(spec.merge_shapes))
    assert all(kernel.spilled_bytes == 0 for kernel in report.kernels)
    assert report.launch_counts["select_topk"] == 2
    assert report.launches <= 9
