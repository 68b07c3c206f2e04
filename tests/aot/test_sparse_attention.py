import functools

import jax
import pytest
from jax.sharding import PartitionSpec

from glm53.model.sharding import make_mesh
from pallas_kernels.common.host_memory import as_device
from pallas_kernels.sparse_attention import merge_attention, prepare_query, sparse_attention
from pallas_kernels.sparse_attention.column_order import LATENT
from pallas_kernels.sparse_attention.specs import SPECS
from scripts.aot.aot import compile_for_h200
from tests.aot.slabs import HOST, SLAB, argument, check_kernel, integers

SCALE = 256**-0.5


@pytest.mark.parametrize("name", ["glm_fp8_128", "glm_bfloat16_8192", "glm_fp8_8192", "odd_wide"])
@pytest.mark.parametrize("tiers", [1, 2])
def test_sparse_attention(name: str, tiers: int) -> None:
    """A kernel that spills, memory that is copied whole, a query or a result that is reordered."""
    spec = SPECS[name]
    slabs = [argument(spec.slabs.slab), argument(spec.slabs.host, host=True)][:tiers]

    def step(query, layer, row_ids, count, slab, host=None):
        host = None if host is None else as_device(host)
        return sparse_attention(
            query,
            slab,
            host,
            layer,
            row_ids,
            count,
            SCALE,
            spec.slabs.row_format,
            implementation="mosaic_gpu" if spec.slabs.row_format.kind == "bfloat16" else None,
        )

    selection = argument(spec.row_ids), argument(spec.count)
    report = compile_for_h200(step, (argument(spec.query), integers(), *selection, *slabs))
    (kernel,) = report.kernels
    check_kernel(kernel, "sparse_attention", 128)
    assert report.host_parameters == ("host",)[: tiers - 1]
    assert report.copies == []
    assert report.temp_bytes == 0
    assert report.launch_counts == {"sparse_attention": 1}


def test_eight_devices() -> None:
    """A query reordered after it is gathered, a result copied for the exchange, more launches for
    what goes before and after."""
    spec, everywhere = SPECS["glm_fp8_128"], PartitionSpec()
    row_format = spec.slabs.row_format
    heads = PartitionSpec(None, "model")

    @functools.partial(
        jax.shard_map,
        mesh=make_mesh(8),
        in_specs=(heads, everywhere, everywhere, everywhere, SLAB, HOST),
        out_specs=heads,
        check_vma=False,
    )
    def step(query, layer, row_ids, count, slab, host):
        prepared = prepare_query(query[..., :LATENT], query[..., LATENT:], row_format)
        attended = sparse_attention(
            jax.lax.all_gather(prepared, "model"),
            slab,
            as_device(host),
            layer,
            row_ids,
            count,
            SCALE,
            row_format,
        )
        attended = jax.lax.all_to_all(attended, "model", split_axis=0, concat_axis=0)
        return merge_attention(attended, row_format).astype(query.dtype)

    query = jax.ShapeDtypeStruct(spec.query.shape[1:], spec.query.dtype)
    arguments = (
        argument(query, 8, heads),
        integers(num_devices=8),
        integers(*spec.row_ids.shape, num_devices=8),
        integers(*spec.count.shape, num_devices=8),
        argument(spec.slabs.slab, 8, SLAB),
        argument(spec.slabs.host, 8, HOST, host=True),
    )
    report = compile_for_h200(step, arguments)
    (kernel,) = report.kernels
    check_kernel(kernel, "sparse_attention", 128)
    assert report.host_parameters == ("host",)
    assert report.copies == []
    assert [(each.kind, each.count) for each in report.collectives] == [
        ("all-gather", 1),
        ("all-to-all", 1),
    ]
    assert report.launches <= 7, report.launch_counts
