"""Stores to shared memory at an address of each thread's own, which Pallas has no operation for."""

from typing import Any

from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, memref, vector
from jaxtyping import Array, Int

from pallas_kernels.common.types import Ref


def scatter(
    buffer: Ref, index: Int[Array, " size"], values: Int[Array, " size"], *, interpreted: bool
) -> None:
    """Writes each value at its own index of shared memory; inside a kernel, on one warpgroup.

    The interpreter cannot run instructions of the GPU. So in it one store writes the whole buffer,
    which is all that differs.

    Args:
        buffer: int32, in shared memory.
        index: where each value goes. Where several go, one of them is found.
        values: what is written.
        interpreted: whether the kernel runs in the interpreter.
    """
    if interpreted:
        buffer[...] = buffer[...].at[index].set(values)
        return
    layout = plgpu.Layout.WG_STRIDED(values.shape, vec_size=1)

    def store(
        _: mgpu.LaunchContext,
        buffer: ir.Value,
        index: mgpu.FragmentedArray,
        values: mgpu.FragmentedArray,
    ) -> None:
        # As before and after every store to shared memory of Pallas' own.
        mgpu.warpgroup_barrier()
        for position, value in zip(index.registers.flat, values.registers.flat, strict=True):
            offset = arith.index_cast(ir.IndexType.get(), vector.extract(position, [], [0]))
            memref.store(vector.extract(value, [], [0]), buffer, [offset])
        mgpu.warpgroup_barrier()

    # Its type is given as that of `store`, which takes the context too.
    inlined: Any = plgpu.inline_mgpu(arg_types=(plgpu.RefType(), layout, layout))(store)
    inlined(buffer, index, values)
