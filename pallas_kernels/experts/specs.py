"""Shapes of experts: GLM-5.3's, and small odd ones for the interpreter."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from pallas_kernels.common.pytree import make_unchecked
from pallas_kernels.experts.operation import StepKind
from pallas_kernels.experts.parameters import ExpertMatrices, GatedStack

_BLOCK = 128


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ExpertSpec:
    """One device's part of the experts of all layers, and the rows of a step.

    Attributes:
        layers: sparse layers.
        num_experts: routed experts of a layer.
        per_token: routed experts of a token.
        hidden: inputs and outputs of an expert.
        width: intermediate values of an expert on this device.
        parts: devices that an expert is divided over.
        quantized: weights are e4m3 with scales.
        round_inputs: inputs are rounded to e4m3.
        kind: kind of step.
        tokens: rows.
    """

    layers: int = 76
    num_experts: int = 256
    per_token: int = 8
    hidden: int = 6144
    width: int = 256
    parts: int = 8
    quantized: bool = True
    round_inputs: bool = False
    kind: StepKind = "decode"
    tokens: int

    @property
    def rows(self) -> jax.ShapeDtypeStruct:
        """[tokens, hidden]."""
        return jax.ShapeDtypeStruct((self.tokens, self.hidden), jnp.bfloat16)

    @property
    def experts(self) -> jax.ShapeDtypeStruct:
        """[tokens, k]."""
        return jax.ShapeDtypeStruct((self.tokens, self.per_token), jnp.int32)

    @property
    def weights(self) -> jax.ShapeDtypeStruct:
        """[tokens, k]."""
        return jax.ShapeDtypeStruct(self.experts.shape, jnp.float32)

    @property
    def routed(self) -> GatedStack:
        """Shapes of the routed experts."""
        return self._stack(self.num_experts)

    @property
    def shared(self) -> GatedStack:
        """Shapes of the shared expert."""
        return self._stack()

    def _stack(self, *experts: int) -> GatedStack:
        def matrix(outputs: int, inputs: int, blocks: tuple[int, int]) -> ExpertMatrices:
            dtype = jnp.float8_e4m3fn if self.quantized else jnp.bfloat16
            weight = jax.ShapeDtypeStruct((self.layers, *experts, outputs, inputs), dtype)
            scale = jax.ShapeDtypeStruct((self.layers, *experts, *blocks), jnp.float32)
            return make_unchecked(
                ExpertMatrices, weight=weight, scale=scale if self.quantized else None
            )

        inputs, values = (-(-size // _BLOCK) for size in (self.hidden, self.width * self.parts))
        first = matrix(self.width, self.hidden, (values, inputs))
        last = matrix(self.hidden, self.width, (inputs, values))
        return make_unchecked(GatedStack, gate=first, up=first, down=last)


def _odd(**changes: object) -> ExpertSpec:
    sizes = {"layers": 2, "num_experts": 5, "per_token": 4, "hidden": 512, "width": 128, "parts": 4}
    return ExpertSpec(**(sizes | changes))  # pyright: ignore[reportArgumentType]


SPECS = {
    **{
        f"glm_{name}_{tokens}": ExpertSpec(tokens=tokens, **how)
        for name, how in {
            "fp8": {},
            "fp8_rounded": {"round_inputs": True},
            "bfloat16": {"quantized": False},
        }.items()
        for tokens in (1, 8, 32, 128, 512)
    },
    "glm_fp8_prefill": ExpertSpec(tokens=8192, kind="prefill"),
    "glm_fp8_rounded_prefill": ExpertSpec(tokens=8192, kind="prefill", round_inputs=True),
    # More rows of an expert than a tile of eight has.
    "odd_fp8": _odd(tokens=9),
    "odd_fp8_rounded": _odd(tokens=2, round_inputs=True, width=256),
    "odd_bfloat16": _odd(tokens=2, quantized=False),
    "odd_fp8_prefill": _odd(tokens=2, kind="prefill"),
}
"""By name."""


def random_parameters(spec: ExpertSpec, rng: np.random.Generator) -> tuple[GatedStack, GatedStack]:
    """Routed and shared experts whose outputs are about as large as their inputs."""

    def draw(matrix: ExpertMatrices) -> ExpertMatrices:
        shape, size = (
            matrix.weight.shape,
            40.0 if spec.quantized else matrix.weight.shape[-1] ** -0.5,
        )
        weight = jnp.asarray(rng.standard_normal(shape) * size, matrix.weight.dtype)
        if matrix.scale is None:
            return ExpertMatrices(weight, None)
        scale = rng.uniform(0.5, 1.5, matrix.scale.shape) / size * shape[-1] ** -0.5
        return ExpertMatrices(weight, jnp.asarray(scale, jnp.float32))

    def stack(shapes: GatedStack) -> GatedStack:
        return GatedStack(draw(shapes.gate), draw(shapes.up), draw(shapes.down))

    return stack(spec.routed), stack(spec.shared)


def random_rows(
    spec: ExpertSpec, rng: np.random.Generator
) -> tuple[Float[Array, "tokens hidden"], Int[Array, "tokens k"], Float[Array, "tokens k"]]:
    """Rows of different size, their experts and weights."""
    size = 2.0 ** rng.integers(-3, 3, (spec.tokens, 1))
    rows = rng.standard_normal(spec.rows.shape) * size
    chosen = [rng.permutation(spec.num_experts)[: spec.per_token] for _ in range(spec.tokens)]
    weights = rng.uniform(0.1, 1, spec.weights.shape)
    return (
        jnp.asarray(rows, jnp.bfloat16),
        jnp.asarray(np.stack(chosen), jnp.int32),
        jnp.asarray(weights, jnp.float32),
    )
