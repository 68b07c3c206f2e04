"""Time of staging from host memory by number of rows, and beside a matrix product."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.xla_metadata import set_xla_metadata

from benchmarks.h200.operations import OPERATIONS
from benchmarks.h200.programs import Body, Call, Chain, Large, Machine, measure

SECOND_STREAM = {"xla_gpu_experimental_stream_annotation": True}
"""XLA's option under which `on_second_stream` has an effect."""
GLM_PRODUCT = (4096, 6144)
"""Rows and width of a product that takes about as long as staging 8,192 rows."""
SMALL_PRODUCT = (16, 32)


@dataclasses.dataclass(frozen=True)
class Staging:
    """Time of staging a number of rows, each with all layers of an index group."""

    rows: int
    num_bytes: int
    seconds: float | None


@dataclasses.dataclass(frozen=True)
class Overlap:
    """Median seconds of a call; None where nothing was measured.

    Attributes:
        staging: staging alone.
        product: the product alone.
        one_stream: both in one program.
        two_streams: both in one program, staging on a stream of its own.
    """

    staging: float | None
    product: float | None
    one_stream: float | None
    two_streams: float | None

    def hidden(self, together: float | None) -> float | None:
        """Share of the shorter one that the other hides."""
        if together is None or self.staging is None or self.product is None:
            return None
        return (self.staging + self.product - together) / min(self.staging, self.product)


def measure_staging(machine: Machine, name: str) -> list[Staging]:
    """Times `stage_rows` of a spec by number of rows, from none (a launch) upwards."""
    operation = OPERATIONS["stage_rows"]
    spec, rng = operation.specs[name], np.random.default_rng(0)
    chain = Chain(machine, operation.body(spec, machine.implementation))
    # Other rows in each call, so that they are in no cache of the GPU.
    lists = [operation.lists(spec, rng, True)[:-1] for _ in range(1 + machine.extra_calls)]
    numbers = sorted({0, *(spec.misses >> shift for shift in (7, 5, 3, 2, 1, 0))})
    cases = [(chain, [(*each, np.asarray(rows, np.int32)) for each in lists]) for rows in numbers]
    row_bytes = operation.work(spec).host_bytes // spec.misses
    return [
        Staging(rows, rows * row_bytes, samples.seconds)
        for rows, samples in zip(numbers, measure(machine, cases), strict=True)
    ]


def on_second_stream(call: Call) -> Call:
    """Returns the call on its own stream, beside work that does not depend on it."""
    jitted = jax.jit(call)

    def annotated(*arrays: jax.Array) -> tuple[jax.Array, ...]:
        with set_xla_metadata(_xla_stream_annotation="1", inlineable="false"):
            return jitted(*arrays)

    return annotated


def together(stage: Call) -> Call:
    """Runs staging and an independent product."""

    def call(
        slab: jax.Array, left: jax.Array, host: jax.Array, right: jax.Array, *lists: jax.Array
    ):
        return *stage(slab, host, *lists), left @ right

    return call


def _normal(array: jax.ShapeDtypeStruct) -> jax.Array:
    return jax.random.normal(jax.random.key(0), array.shape, array.dtype)


def _keeping_magnitude(array: jax.ShapeDtypeStruct) -> jax.Array:
    """Returns a matrix by which one can multiply repeatedly without overflow."""
    return _normal(array) * jnp.asarray(array.shape[0] ** -0.5, array.dtype)


def overlap_bodies(machine: Machine, name: str, product: tuple[int, int]) -> list[Body]:
    """Returns the body that each field of `Overlap` times, all with the lists of `stage_rows`."""
    operation = OPERATIONS["stage_rows"]
    spec, (rows, width) = operation.specs[name], product
    stage = operation.body(spec, machine.implementation)
    both = (together(stage.call), together(on_second_stream(stage.call)))
    left = Large(jax.ShapeDtypeStruct((rows, width), jnp.bfloat16), _normal)
    right = Large(jax.ShapeDtypeStruct((width, width), jnp.bfloat16), _keeping_magnitude)
    state, kept = (*stage.state, left), (*stage.kept, right)
    return [
        stage,
        Body(lambda left, right, *lists: (left @ right,), (left,), (right,)),
        Body(both[0], state, kept),
        Body(both[1], state, kept, SECOND_STREAM),
    ]


def measure_overlap(machine: Machine, name: str, product: tuple[int, int]) -> Overlap:
    """Times staging and a product, alone and in one program."""
    operation = OPERATIONS["stage_rows"]
    spec, rng = operation.specs[name], np.random.default_rng(0)
    lists = [operation.lists(spec, rng, True) for _ in range(1 + machine.extra_calls)]
    cases = [(Chain(machine, body), lists) for body in overlap_bodies(machine, name, product)]
    return Overlap(*(samples.seconds for samples in measure(machine, cases)))
