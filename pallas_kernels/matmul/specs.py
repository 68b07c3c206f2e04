"""Shapes of matrix products: GLM-5.3's on one H200 of eight, and small odd ones."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from pallas_kernels.common.pytree import make_unchecked
from pallas_kernels.common.row_format import SCALE_GROUP
from pallas_kernels.matmul.matrix_stack import MatrixStack


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MatmulSpec:
    """Matrices that are multiplied together.

    Attributes:
        stack: leading axes of every stack.
        outputs: of each matrix, or of a device's part.
        inputs: of all of them.
        fp8: weights are e4m3 with scales, not bfloat16.
        round_inputs: rows are rounded to e4m3.
        parts: parts into which outputs are divided, and inputs.
    """

    stack: tuple[int, ...]
    outputs: tuple[int, ...]
    inputs: int
    fp8: bool = True
    round_inputs: bool = False
    parts: tuple[int, int] = (1, 1)

    def rows(self, tokens: int) -> jax.ShapeDtypeStruct:
        """[tokens, inputs]."""
        return jax.ShapeDtypeStruct((tokens, self.inputs), jnp.bfloat16)

    def stacks(self) -> list[MatrixStack]:
        """Shapes of the stacks."""
        return [self._matrices(outputs) for outputs in self.outputs]

    def _matrices(self, outputs: int) -> MatrixStack:
        shape = (outputs, self.inputs)
        blocks = tuple(
            -(-size * parts // SCALE_GROUP) for size, parts in zip(shape, self.parts, strict=True)
        )
        number = jax.ShapeDtypeStruct((), jnp.int32)
        parts = [number if parts > 1 else None for parts in self.parts]
        weight = jnp.float8_e4m3fn if self.fp8 else jnp.bfloat16
        scale = jax.ShapeDtypeStruct((*self.stack, *blocks), jnp.float32)
        return make_unchecked(
            MatrixStack,
            weight=jax.ShapeDtypeStruct((*self.stack, *shape), weight),
            scale=scale if self.fp8 else None,
            dtype=jnp.bfloat16,
            round_inputs=self.round_inputs,
            output_part=parts[0],
            input_part=parts[1],
        )


SPECS = {
    "q_a_and_kv_a": MatmulSpec(stack=(79,), outputs=(2048, 576), inputs=6144),
    "q_a_kv_a_and_wk": MatmulSpec(stack=(79,), outputs=(2048, 576, 128), inputs=6144),
    "q_b": MatmulSpec(stack=(79,), outputs=(2048,), inputs=2048, parts=(8, 1)),
    "wq_b": MatmulSpec(stack=(22,), outputs=(4096,), inputs=2048),
    "o": MatmulSpec(stack=(79,), outputs=(6144,), inputs=2048, parts=(1, 8)),
    "gate_and_up": MatmulSpec(stack=(3,), outputs=(1536, 1536), inputs=6144, parts=(8, 1)),
    "down": MatmulSpec(stack=(3,), outputs=(6144,), inputs=1536, parts=(1, 8)),
    "shared_gate_and_up": MatmulSpec(stack=(76,), outputs=(256, 256), inputs=6144, parts=(8, 1)),
    "shared_down": MatmulSpec(stack=(76,), outputs=(6144,), inputs=256, parts=(1, 8)),
    "eh_proj": MatmulSpec(stack=(), outputs=(6144,), inputs=12288),
    "q_a_and_kv_a_rounded": MatmulSpec(
        stack=(79,), outputs=(2048, 576), inputs=6144, round_inputs=True
    ),
    "o_rounded": MatmulSpec(
        stack=(79,), outputs=(6144,), inputs=2048, round_inputs=True, parts=(1, 8)
    ),
    "router": MatmulSpec(stack=(76,), outputs=(256,), inputs=6144, fp8=False),
    "weights_proj": MatmulSpec(stack=(22,), outputs=(32,), inputs=6144, fp8=False),
    "lm_head": MatmulSpec(stack=(), outputs=(19360,), inputs=6144, fp8=False, parts=(8, 1)),
    # A tile that is not whole, inputs in two parts.
    "odd_fp8": MatmulSpec(stack=(2,), outputs=(72,), inputs=1024),
    # Fewer blocks of inputs than warpgroups.
    "odd_fp8_part": MatmulSpec(stack=(2, 3), outputs=(128, 128), inputs=384, parts=(2, 2)),
    # More of them for one warpgroup than for the others.
    "odd_fp8_rounded": MatmulSpec(stack=(2,), outputs=(8,), inputs=640, round_inputs=True),
    "odd_bfloat16": MatmulSpec(stack=(), outputs=(32, 72), inputs=640, fp8=False),
    # Both arrangements of warpgroups with many rows.
    "many_fp8": MatmulSpec(stack=(2,), outputs=(192, 128), inputs=256),
    "many_fp8_rounded": MatmulSpec(stack=(2,), outputs=(192, 128), inputs=256, round_inputs=True),
    "many_bfloat16": MatmulSpec(stack=(2,), outputs=(192, 128), inputs=256, fp8=False),
}
"""By name."""


def random_rows(spec: MatmulSpec, tokens: int, rng: np.random.Generator) -> Float[Array, "t i"]:
    """Rows of very different sizes."""
    rows = rng.standard_normal((tokens, spec.inputs)) * 10.0 ** rng.integers(-6, 6, (tokens, 1))
    return jnp.asarray(rows, jnp.bfloat16)


def random_stacks(spec: MatmulSpec, rng: np.random.Generator) -> list[MatrixStack]:
    """Stacks of random matrices; a part is the last."""

    def draw(shape: jax.ShapeDtypeStruct) -> jax.Array:
        if shape.dtype == jnp.int32:
            return jnp.int32(max(spec.parts) - 1)
        if shape.dtype == jnp.float32:
            return jnp.asarray(rng.uniform(1e-4, 1e-2, shape.shape), jnp.float32)
        return jnp.asarray(40 * rng.standard_normal(shape.shape), shape.dtype)

    return jax.tree.map(draw, spec.stacks())
