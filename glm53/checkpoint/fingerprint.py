"""Identity of a model's cached rows: equal for equal parameters and numerics, and for no others.

The digest of a parameter is a sum over its elements (AdHash, Bellare and Micciancio 1997), so that
it depends on no order and shards can be summed apart. An element adds a mix of its indices and its
bits, modulo 2**32, in four lanes that are keyed apart. The mix is a bijection of the bits: a change
of one element, be it one bit, the sign of zero or a NaN's payload, changes every lane. Any other
change goes unseen with a chance of about 2**-128. This guards against mistakes and not against an
adversary: such sums can be forged.
"""

import dataclasses
import functools
import hashlib
import json
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Shaped, UInt32

from glm53.model.config import GLMConfig
from pallas_kernels.common.compiler_options import gpu_options

# Fields of the config on which no cached row depends: where sequences end, what drafts select, and
# how the checkpoint was stored. A field that is added counts until it is named here.
_NOT_OF_ROWS = {
    "eos_token_ids",
    "index_share_for_mtp_iteration",
    "max_position_embeddings",
    "weight_dtype",
}

_LANE_KEYS = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344)  # Digits of pi.


def model_fingerprint(config: GLMConfig, params: nnx.State) -> str:
    """Digest of all parameters in memory, and of what the config says of their arithmetic.

    It is the same on every mesh and for every format of checkpoint. The devices read their shards
    once, and copy nothing.

    Args:
        config: the model.
        params: its parameters, on one mesh.

    Returns:
        64 hexadecimal digits.
    """
    flat = sorted((".".join(map(str, path)), leaf[...]) for path, leaf in nnx.to_flat_state(params))
    names, arrays = zip(*flat, strict=True)
    digests = digest_arrays(arrays)
    described = {
        "config": _numerics(config),
        "parameters": [
            [name, array.shape, array.dtype.name, digest.tolist()]
            for name, array, digest in zip(names, arrays, digests, strict=True)
        ],
    }
    return hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()


def digest_arrays(arrays: Sequence[Shaped[Array, "..."]]) -> list[UInt32[np.ndarray, " lanes"]]:
    """Digests of arrays on one mesh, whatever their shardings: of their bits, and of no shape."""
    shardings = [_named_sharding(array) for array in arrays]
    specs = tuple(sharding.spec for sharding in shardings)
    return jax.device_get(_digest_program(shardings[0].mesh, specs)(tuple(arrays)))


def _named_sharding(array: jax.Array) -> NamedSharding:
    assert isinstance(array.sharding, NamedSharding)
    return array.sharding


@functools.cache
def _digest_program(mesh: Mesh, specs: tuple[PartitionSpec, ...]) -> Callable:
    """The jitted program that takes arrays of these shardings to their digests."""

    def local(arrays: tuple[jax.Array, ...]) -> list[jax.Array]:
        return [_digest_shard(array, spec) for array, spec in zip(arrays, specs, strict=True)]

    mapped = jax.shard_map(
        local, mesh=mesh, in_specs=(specs,), out_specs=PartitionSpec(), check_vma=False
    )
    return jax.jit(mapped, compiler_options=gpu_options(mesh))


def _digest_shard(array: Shaped[Array, "..."], spec: PartitionSpec) -> UInt32[Array, " lanes"]:
    """Digest of an array, from the shard of each device; inside `shard_map`."""
    if not array.size:  # XLA:CPU crashes on collectives of constants.
        return jnp.zeros(len(_LANE_KEYS), jnp.uint32)
    axes = [*spec, *[None] * (array.ndim - len(spec))]
    indices = []
    for axis, name in enumerate(axes):
        shape = [1] * array.ndim
        shape[axis] = array.shape[axis]
        index = lax.broadcasted_iota(jnp.uint32, shape, axis)
        if name is not None:
            index += lax.axis_index(name).astype(jnp.uint32) * jnp.uint32(array.shape[axis])
        indices.append(index)
    bits = lax.bitcast_convert_type(array, f"uint{8 * array.dtype.itemsize}").astype(jnp.uint32)
    lanes = tuple(_mix_element(jnp.uint32(key), indices, bits) for key in _LANE_KEYS)
    # All lanes in one reduction, which XLA makes one pass without temporaries.
    sums = lax.reduce(
        lanes,
        (jnp.uint32(0),) * len(lanes),
        lambda left, right: tuple(map(lax.add, left, right)),
        tuple(range(array.ndim)),
    )
    sharded = tuple(name for name in axes if name is not None)
    return lax.psum(jnp.stack(sums), sharded) if sharded else jnp.stack(sums)


def _mix_element(
    key: UInt32[Array, ""],
    indices: Sequence[UInt32[Array, "..."]],
    bits: UInt32[Array, "..."],
) -> UInt32[Array, "..."]:
    """Contribution of elements to a lane."""
    mixed = key
    for index in indices:
        mixed = _mix(mixed ^ index)
    return _mix(mixed ^ bits)


def _mix(value: UInt32[Array, "..."]) -> UInt32[Array, "..."]:
    """The finalizer of MurmurHash3, a bijection each of whose input bits moves half the output."""
    value = (value ^ (value >> 16)) * jnp.uint32(0x85EBCA6B)
    value = (value ^ (value >> 13)) * jnp.uint32(0xC2B2AE35)
    return value ^ (value >> 16)


def _numerics(config: GLMConfig) -> dict[str, Any]:
    """Fields on which rows depend; 1 and 1.0 are one value where the field is a float."""
    return {
        field.name: float(value) if field.type is float else value
        for field in dataclasses.fields(config)
        if field.name not in _NOT_OF_ROWS
        for value in [getattr(config, field.name)]
    }
