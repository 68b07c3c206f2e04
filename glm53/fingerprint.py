"""A name for a model's rows: the same for the same weights and numerics, and for no others."""

import hashlib

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from glm53.config import GLMConfig

_SAMPLED = 64


def model_fingerprint(config: GLMConfig, params: nnx.State) -> str:
    """A digest of the configuration and of a sample of every parameter, on any mesh.

    The sample is the first and the last few numbers of the first and the last of the vectors that
    make up a parameter.
    """

    def sample(parameter: jax.Array) -> jax.Array:
        ends = []
        for end in (0, -1):
            vector = parameter[(end,) * (parameter.ndim - 1)].astype(jnp.float32)
            ends += [vector[:_SAMPLED], vector[-_SAMPLED:]]
        return jnp.concatenate(ends)

    samples = jax.jit(lambda leaves: [sample(leaf) for leaf in leaves])(jax.tree.leaves(params))
    digest = hashlib.sha256(repr(config).encode())
    for array in samples:
        digest.update(np.asarray(array).tobytes())
    return digest.hexdigest()
