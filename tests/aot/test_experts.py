import functools

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from glm53.model.sharding import make_mesh
from pallas_kernels.common.pytree import make_unchecked
from pallas_kernels.experts import ExpertMatrices, GatedStack, route, run_experts
from pallas_kernels.experts.specs import SPECS, ExpertSpec
from scripts.aot.aot import CompileReport, compile_for_h200
from tests.aot.slabs import SHARED_BYTES, argument, integers

KERNELS = ("experts_tiles", "experts_gate_up", "experts_down", "experts_combine")
REGISTERS = {"decode": 168, "prefill": 255}
"""Most registers a thread of the kernels that multiply: in a decode step three blocks of a
multiprocessor have room for them."""

QUICK = (
    "glm_fp8_8",
    "glm_fp8_512",
    "glm_fp8_rounded_8",
    "glm_bfloat16_8",
    "glm_fp8_prefill",
)
"""Shapes that have all kernels between them, but for the sizes of lists."""


def on_one(stack: GatedStack) -> GatedStack:
    return jax.tree.map(argument, stack)


def compiled(spec: ExpertSpec) -> CompileReport:
    run = functools.partial(run_experts, round_inputs=spec.round_inputs, kind=spec.kind)
    rows = [argument(x) for x in (spec.rows, spec.experts, spec.weights)]
    stacks = (on_one(spec.routed), on_one(spec.shared))
    return compile_for_h200(run, [*rows, integers(), integers(), *stacks])


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in QUICK else pytest.mark.slow)
        for name in SPECS
        if name.startswith("glm")
    ],
)
def test_experts(name: str) -> None:
    """A kernel that spills, weights or rows that are copied, a launch more than the four."""
    spec, report = SPECS[name], compiled(SPECS[name])
    assert sorted(kernel.name for kernel in report.kernels) == sorted(KERNELS)
    for kernel in report.kernels:
        assert kernel.spilled_bytes == 0
        assert kernel.shared_bytes <= SHARED_BYTES
        if kernel.name in ("experts_gate_up", "experts_down"):
            assert kernel.registers <= REGISTERS[spec.kind]
            # Two blocks of a multiprocessor, so that one multiplies while the other waits.
            if spec.kind == "decode" and spec.quantized:
                assert kernel.shared_bytes <= (SHARED_BYTES - 2048) // 2
    assert report.copies == []
    assert report.launch_counts == dict.fromkeys(KERNELS, 1)
    assert report.loops == () and report.branches == ()
    pairs = spec.tokens * (spec.per_token + 1)
    tile = {"decode": 16, "prefill": 64}[spec.kind]
    tiles = spec.num_experts + pairs // tile + 1
    outputs, values = 2 * pairs * spec.hidden, 2 * tiles * tile * spec.width
    assert report.temp_bytes <= outputs + values + 4 * tiles * (tile + 4) + (64 << 10)


@pytest.mark.parametrize("tokens", [8, 512])
def test_route(tokens: int) -> None:
    """A choice that XLA has a part in."""
    scores = argument(jax.ShapeDtypeStruct((tokens, 256), jnp.float32))
    bias = argument(jax.ShapeDtypeStruct((76, 256), jnp.float32))
    run = functools.partial(route, per_token=8, scaling=2.5)
    report = compile_for_h200(run, [scores, bias, integers(tokens), integers()])
    (kernel,) = report.kernels
    assert kernel.name == "experts_route"
    assert kernel.spilled_bytes == 0
    assert kernel.registers <= 64
    assert report.launch_counts == {"experts_route": 1}
    assert report.copies == [] and report.temp_bytes == 0


def test_eight_devices() -> None:
    """Weights that are copied or gathered where shard_map or scan meets the kernels."""
    spec, mesh, everywhere = SPECS["glm_fp8_8"], make_mesh(8), PartitionSpec()

    def specs(rank: int) -> GatedStack:
        outputs = PartitionSpec(*[None] * (rank - 2), "model")
        inputs = PartitionSpec(*[None] * (rank - 1), "model")
        matrices = (
            make_unchecked(ExpertMatrices, weight=weight, scale=everywhere)
            for weight in (outputs, outputs, inputs)
        )
        return GatedStack(*matrices)

    def whole(shape: jax.ShapeDtypeStruct, spec: PartitionSpec) -> jax.ShapeDtypeStruct:
        sizes = [
            size * 8 if axis else size
            for size, axis in zip(shape.shape, (*spec, *[None] * 4), strict=False)
        ]
        return jax.ShapeDtypeStruct(sizes, shape.dtype, sharding=NamedSharding(mesh, spec))

    def step(
        rows: jax.Array,
        experts: jax.Array,
        weights: jax.Array,
        routed: GatedStack,
        shared: GatedStack,
    ) -> jax.Array:
        offset = lax.axis_index("model") * spec.width

        def layer(rows: jax.Array, number: jax.Array) -> tuple[jax.Array, None]:
            rows = run_experts(
                rows,
                experts,
                weights,
                number,
                offset,
                routed,
                shared,
                round_inputs=False,
                kind="decode",
            )
            return rows, None

        return lax.scan(layer, rows, jnp.arange(spec.layers))[0]

    in_specs = (everywhere,) * 3 + (specs(4), specs(3))
    arguments = (spec.rows, spec.experts, spec.weights, spec.routed, spec.shared)
    report = compile_for_h200(
        jax.shard_map(step, mesh=mesh, in_specs=in_specs, out_specs=everywhere, check_vma=False),
        [
            jax.tree.map(functools.partial(whole, spec=each), argument)
            if isinstance(each, PartitionSpec)
            else jax.tree.map(whole, argument, each)
            for argument, each in zip(arguments, in_specs, strict=True)
        ],
        donate=[0],
    )
    assert report.copies == []
    assert report.collectives == () and report.branches == ()
    assert [loop.trip_count for loop in report.loops] == [spec.layers]
    for name in KERNELS:
        assert report.launch_counts[name] == spec.layers
    # Weights are not among them: a layer's are 4.7 MB an expert.
    assert report.temp_bytes <= 8 << 20
