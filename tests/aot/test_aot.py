import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pallas_kernels.common.host_memory import HOST_MEMORY, as_device, as_host
from scripts.aot.aot import Collective, KernelReport, compile_for_h200

MESH = Mesh(np.array(jax.devices()), ("model",))
SHARDED, REPLICATED = (NamedSharding(MESH, PartitionSpec(*axes)) for axes in (("model",), ()))
IN_HOST = SHARDED.with_memory_kind(HOST_MEMORY)
ROWS, WIDTH = 64, 128
ROW_BYTES = 4 * WIDTH


def array(
    *shape: int, sharding: NamedSharding | None = None, dtype: Any = jnp.float32
) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)


def move_row(source: jax.Array, target: jax.Array, index: jax.Array) -> jax.Array:
    """Copies row `index` of `source` to row 0 of `target` in place, through shared memory."""
    scratch = [plgpu.SMEM((1, WIDTH), jnp.float32), plgpu.Barrier()]

    @functools.partial(plgpu.kernel, out_type=(), scratch_types=scratch)
    def move(source_ref, index_ref, target_ref, row_ref, barrier):
        plgpu.copy_gmem_to_smem(source_ref.at[pl.ds(index_ref[0], 1)], row_ref, barrier)
        plgpu.barrier_wait(barrier)
        plgpu.copy_smem_to_gmem(row_ref, target_ref.at[pl.ds(0, 1)])
        plgpu.wait_smem_to_gmem(0)

    reference = jax.new_ref(target)
    move(source, index, reference)
    return jax.freeze(reference)


def normalize(width: int) -> Callable[[jax.Array], jax.Array]:
    """A kernel that keeps 128 x `width` numbers in the registers of 128 threads at a time."""

    @functools.partial(plgpu.kernel, out_type=array(128, width))
    def normalize(values_ref, out_ref):
        values = values_ref[...]
        out_ref[...] = values / jnp.sum(values)

    return normalize


def test_copy() -> None:
    """A copy of an array that is not donated, or one below the threshold, in the wrong place."""

    def step(slab: jax.Array) -> jax.Array:
        return slab.at[3].set(1.0)

    (copy,) = compile_for_h200(step, [array(ROWS, WIDTH)]).copies
    assert f"f32[{ROWS},{WIDTH}]" in copy
    assert not compile_for_h200(step, [array(ROWS, WIDTH)], donate=[0]).copies
    larger = compile_for_h200(step, [array(ROWS, WIDTH)], min_copy_bytes=ROWS * ROW_BYTES + 1)
    assert not larger.copies


def test_copy_in_loop() -> None:
    """A copy that hides in the body of a loop."""

    def step(slab: jax.Array) -> tuple[jax.Array, jax.Array]:
        def turn(carry: tuple[jax.Array, jax.Array], _: None) -> tuple:
            new, old = carry
            return (new.at[0].set(old[1] + 1), new), None

        return lax.scan(turn, (slab, slab), None, length=7)[0]

    assert len(compile_for_h200(step, [array(ROWS, WIDTH)], donate=[0]).copies) >= 2


def test_change_of_layout() -> None:
    """An array that is rewritten in another layout, which XLA no longer calls a copy."""
    report = compile_for_h200(lambda slab: slab.T, [array(ROWS, WIDTH)])
    (transpose,) = report.copies
    assert " transpose(" in transpose
    assert report.launch_counts == {"fusion": 1}


def test_kernel_figures() -> None:
    """A kernel that spills and is not reported, or one that does not and is."""
    fits = compile_for_h200(normalize(64), [array(128, 64)])
    (kernel,) = fits.kernels
    assert kernel.name == "normalize"
    assert 64 <= kernel.registers <= 255
    assert kernel.spilled_bytes == 0
    assert fits.launch_counts == {"normalize": 1}

    (kernel,) = compile_for_h200(normalize(320), [array(128, 320)]).kernels
    assert kernel.registers == 255
    assert kernel.spilled_bytes > 0


def test_host_operand() -> None:
    """A host array that is copied to the device, or read there but not updated in place."""

    def stage(host: jax.Array, slab: jax.Array, index: jax.Array) -> jax.Array:
        return move_row(as_device(host), slab, index)

    def clean(host: jax.Array, slab: jax.Array, index: jax.Array) -> jax.Array:
        return as_host(move_row(slab, as_device(host), index))

    device = NamedSharding(Mesh(np.array(jax.devices()[:1]), ("model",)), PartitionSpec())
    host = device.with_memory_kind(HOST_MEMORY)
    arguments = [
        array(ROWS, WIDTH, sharding=host),
        array(ROWS, WIDTH, sharding=device),
        array(1, sharding=device, dtype=jnp.int32),
    ]
    for report, in_device, in_host in (
        (compile_for_h200(stage, arguments, donate=[1]), ROWS, 0),
        (compile_for_h200(clean, arguments, donate=[0], out_shardings=host), 0, ROWS),
    ):
        assert report.host_parameters == ("host",)
        assert report.copies == []
        assert report.device.aliased_bytes == in_device * ROW_BYTES
        assert report.host.aliased_bytes == in_host * ROW_BYTES
        assert report.aliased_bytes == ROWS * ROW_BYTES
        assert report.temp_bytes == 0
        (kernel,) = report.kernels
        assert ROW_BYTES + 8 <= kernel.shared_bytes <= 1024 + 16  # Mosaic pads to 1024
        assert report.launches == 1

    copied = compile_for_h200(clean, arguments, out_shardings=host)
    assert copied.copies
    assert copied.host.aliased_bytes == 0


def test_eight_devices() -> None:
    """Loops, collectives or bytes of a sharded program that are counted wrongly."""

    @functools.partial(
        jax.shard_map,
        mesh=MESH,
        in_specs=(PartitionSpec("model"), PartitionSpec("model"), PartitionSpec()),
        out_specs=(PartitionSpec("model"), PartitionSpec("model"), PartitionSpec()),
        check_vma=False,
    )
    def step(host: jax.Array, slab: jax.Array, index: jax.Array) -> tuple:
        def layer(carry: tuple[jax.Array, jax.Array], _: None) -> tuple:
            host, slab = carry
            slab = move_row(host, slab, index)
            return (move_row(slab, host, index), slab), None

        (host, slab), _ = lax.scan(layer, (as_device(host), slab), None, length=5)
        rows = lax.all_gather(slab[0], "model")
        return as_host(host), slab, rows

    arguments = [
        array(8 * ROWS, WIDTH, sharding=IN_HOST),
        array(8 * ROWS, WIDTH, sharding=SHARDED),
        array(1, sharding=REPLICATED, dtype=jnp.int32),
    ]
    report = compile_for_h200(
        step, arguments, donate=[0, 1], out_shardings=(IN_HOST, SHARDED, REPLICATED)
    )
    assert report.host_parameters == ("host",)
    assert report.copies == []
    assert report.device.aliased_bytes == report.host.aliased_bytes == ROWS * ROW_BYTES
    assert [loop.trip_count for loop in report.loops] == [5]
    assert report.launch_counts["move"] == 10
    assert report.collectives == (Collective("all-gather", 1, 8 * ROW_BYTES),)
    assert report.launch_counts["all-gather"] == 1


def test_loop_of_unknown_length() -> None:
    """A loop whose bound the host reads back, taken for one that runs on its own."""

    def step(values: jax.Array, bound: jax.Array) -> jax.Array:
        return lax.while_loop(lambda x: x[0] < bound, lambda x: x * 2, values)

    (loop,) = compile_for_h200(step, [array(WIDTH), array()]).loops
    assert loop.trip_count is None


def test_output_sharding_is_free() -> None:
    """An output of unspecified sharding that is gathered on every device."""
    report = compile_for_h200(lambda x: x + 1, [array(8 * ROWS, WIDTH, sharding=SHARDED)])
    assert report.collectives == ()
    assert report.device.output_bytes == ROWS * ROW_BYTES


def test_jitted_function() -> None:
    """Its donation is lost, or its options for XLA on a CPU are used for a GPU."""

    def step(slab: jax.Array) -> jax.Array:
        return slab.at[3].set(1.0)

    jitted = jax.jit(step, donate_argnums=0)
    assert compile_for_h200(jitted, [array(ROWS, WIDTH)]).aliased_bytes == ROWS * ROW_BYTES
    jitted = jax.jit(step, compiler_options={"no_such_option": 1})
    compile_for_h200(jitted, [array(ROWS, WIDTH)])


def test_compiler_options() -> None:
    """Options that do not reach XLA."""
    with pytest.raises(jax.errors.JaxRuntimeError, match="no_such_option"):
        compile_for_h200(lambda x: x + 1, [array(WIDTH)], compiler_options={"no_such_option": 1})


def test_mesh() -> None:
    """A mesh that is not set while the function is traced."""

    def step(x: jax.Array) -> jax.Array:
        assert jax.sharding.get_abstract_mesh() == MESH.abstract_mesh
        return x + 1

    compile_for_h200(step, [array(8, WIDTH, sharding=SHARDED)], mesh=MESH)


def test_compiled_twice() -> None:
    """Figures that are lost where jax or the plugin has the kernel from before."""
    jitted = jax.jit(normalize(32))
    first, again = (compile_for_h200(jitted, [array(128, 32)]).kernels for _ in range(2))
    assert first == again
    assert isinstance(first[0], KernelReport)


def test_lowered_elsewhere() -> None:
    """A program that was traced and lowered before reported as it was then, or without figures."""
    jitted = jax.jit(normalize(16))
    jitted.trace(array(128, 16)).lower(lowering_platforms=("cuda",))
    (kernel,) = compile_for_h200(jitted, [array(128, 16)]).kernels
    assert kernel.registers > 0
