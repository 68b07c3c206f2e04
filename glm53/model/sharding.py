"""The mesh, and the one table that maps logical axes of parameters to it."""

from typing import Any

import jax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from glm53.model.config import GLMConfig
from kvcache.device.store import MESH_AXIS

LogicalAxes = tuple[str | None, ...]

RULES: dict[str | None, str | None] = {
    "vocab": MESH_AXIS,
    "heads": MESH_AXIS,
    "intermediate": MESH_AXIS,
    "expert_intermediate": MESH_AXIS,
    "hidden": None,
    "latent": None,
    "index": None,
    "experts": None,
    "layers": None,
    None: None,
}
"""Mesh axis of each logical axis; None is replicated."""


def make_mesh(num_devices: int = 1) -> Mesh:
    """A mesh of one axis over the first `num_devices` devices.

    Raises:
        ValueError: there are fewer devices, or none.
    """
    devices = find_devices()
    if not 1 <= num_devices <= len(devices):
        on_cpu = devices[0].platform == "cpu"
        more = f": JAX_NUM_CPU_DEVICES={num_devices} makes more on a CPU" if on_cpu else ""
        raise ValueError(
            f"tensor_parallel_size is {num_devices}, but only {len(devices)} "
            f"{'device is' if len(devices) == 1 else 'devices are'} available{more}"
        )
    return jax.make_mesh(
        (num_devices,),
        (MESH_AXIS,),
        (jax.sharding.AxisType.Auto,),
        devices=devices[:num_devices],
    )


def find_devices(platform: str | None = None) -> list[Any]:
    """The devices of a platform, or of the one that jax prefers.

    Raises:
        ValueError: jax has none with the value of JAX_PLATFORMS.
    """
    try:
        return jax.devices(platform)
    # jax fails in an assertion where JAX_PLATFORMS names a platform whose plugin is missing.
    except (RuntimeError, AssertionError) as error:
        cause = f" ({str(error).splitlines()[0]})" if str(error) else ""
        raise ValueError(
            f"jax has no device with JAX_PLATFORMS={jax.config.jax_platforms}{cause}: set "
            "JAX_PLATFORMS=cpu, or install jax for the device (NVIDIA: pip install 'glm53[gpu]')"
        ) from error


def check_mesh(config: GLMConfig, mesh: Mesh) -> None:
    """Refuses a mesh that does not divide every sharded axis.

    Raises:
        ValueError: naming the axis and the config field.
    """
    num_devices = mesh.shape[MESH_AXIS]
    sizes = {
        "heads": ("num_attention_heads", config.num_attention_heads),
        "intermediate": ("intermediate_size", config.intermediate_size),
        "expert_intermediate": ("moe_intermediate_size", config.moe_intermediate_size),
        "vocab": ("vocab_size", config.vocab_size),
    }
    for axis, (field, size) in sizes.items():
        if RULES[axis] is not None and size % num_devices:
            raise ValueError(
                f"{num_devices} devices (tensor_parallel_size) do not divide the axis '{axis}' "
                f"({field} = {size})"
            )


def partition_spec(axes: LogicalAxes) -> PartitionSpec:
    """The PartitionSpec of logical axes."""
    return PartitionSpec(*(RULES[axis] for axis in axes))


def parameter_specs(params: nnx.State) -> nnx.State:
    """PartitionSpecs in the structure of `params`, from the axes each parameter carries."""
    return jax.tree.map(
        lambda param: param.replace(partition_spec(param.logical_axes)),
        params,
        is_leaf=lambda leaf: isinstance(leaf, nnx.Variable),
    )


def parameter_shardings(params: nnx.State, mesh: Mesh) -> nnx.State:
    """NamedShardings in the structure of `params`."""
    return jax.tree.map(
        lambda spec: NamedSharding(mesh, spec),
        parameter_specs(params),
        is_leaf=lambda leaf: isinstance(leaf, PartitionSpec),
    )
