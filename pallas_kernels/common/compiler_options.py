"""XLA's options for programs with kernels on a GPU."""

from collections.abc import Mapping

from jax.sharding import Mesh

GPU_COMPILER_OPTIONS: Mapping[str, str | bool] = {
    # Memory is laid out beforehand and arguments are updated in place: computing values twice to
    # save memory would cost time and make no room.
    "xla_disable_hlo_passes": "rematerialization",
    # A kernel that XLA joins with a slice of an operand is given a result of its own, instead of
    # the operand that it writes in place.
    "xla_gpu_enable_dynamic_slice_fusion": False,
}
"""Compiler options of `compile_for_h200`, and of `jax.jit` on a GPU."""


def gpu_options(mesh: Mesh) -> dict[str, str | bool] | None:
    """`jax.jit`'s `compiler_options` for a program on the mesh; None on other devices."""
    return dict(GPU_COMPILER_OPTIONS) if mesh.devices.flat[0].platform == "gpu" else None
