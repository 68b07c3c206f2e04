"""Shapes of norms: GLM-5.3's, and small odd ones for the interpreter."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float


@dataclasses.dataclass(frozen=True, slots=True)
class NormSpec:
    """Rows to normalise.

    Attributes:
        layers: layers of the stack of weights.
        tokens: rows.
        width: values of a row.
    """

    layers: int
    tokens: int
    width: int

    @property
    def rows(self) -> jax.ShapeDtypeStruct:
        """[tokens, width], in bfloat16."""
        return jax.ShapeDtypeStruct((self.tokens, self.width), jnp.bfloat16)

    @property
    def weights(self) -> jax.ShapeDtypeStruct:
        """[layers, width], in bfloat16."""
        return jax.ShapeDtypeStruct((self.layers, self.width), jnp.bfloat16)


SPECS = {
    "glm_hidden": NormSpec(79, 128, 6144),
    "glm_query": NormSpec(79, 128, 2048),
    "glm_latent": NormSpec(79, 128, 512),
    "odd_long": NormSpec(3, 5, 1536),
    "odd_short": NormSpec(2, 3, 512),
}
"""By name."""


def random_rows(spec: NormSpec, rng: np.random.Generator) -> Float[Array, "tokens width"]:
    """Rows of very different sizes, of which the last is zero."""
    values = rng.standard_normal(spec.rows.shape) * 10.0 ** rng.integers(-3, 4, (spec.tokens, 1))
    values[-1] = 0
    return jnp.asarray(values, jnp.bfloat16)
