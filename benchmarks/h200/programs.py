"""Programs that call one operation once or many times, and their timing.

An operation is `call(*state, *kept, *lists)`, which returns the new state, updated in place, and
then its other results. A program calls it once for each of several lists.

The time of a program includes the launch from Python, the transfer of a flag and the wait, which
take longer than most operations here. So programs of one call and of many run in turns, and the
time of a call is the difference divided by the number of additional calls. Each call depends on the
one before: through the state, or, without state, through a zero times a result that is added to the
next call's last list, for which XLA launches one more small kernel.
"""

import dataclasses
import functools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import SingleDeviceSharding

from pallas_kernels.common.compiler_options import GPU_COMPILER_OPTIONS
from pallas_kernels.common.host_memory import HOST_MEMORY, as_device, as_host
from pallas_kernels.common.implementation import Implementation

Call = Callable[..., tuple[Any, ...]]


@dataclasses.dataclass(frozen=True, slots=True)
class Large:
    """Large operand that is computed where it is needed, with the same bits everywhere.

    Attributes:
        array: shape and dtype.
        fill: computes the operand from these.
        in_host: whether it lies in host memory.
    """

    array: jax.ShapeDtypeStruct
    fill: Callable[[jax.ShapeDtypeStruct], jax.Array]
    in_host: bool = False


Operand = jax.Array | np.ndarray | Large
Operands = tuple[Operand, ...]
Rng = np.random.Generator


def scattered_bits(array: jax.ShapeDtypeStruct) -> jax.Array:
    """Returns bits computed from the indices, which differ from element to element."""
    mixed = jnp.uint32(0x9E3779B9)
    for axis, factor in enumerate((0x85EBCA6B, 0xC2B2AE35, 0x27D4EB2F, 0x165667B1)[: array.ndim]):
        mixed += lax.broadcasted_iota(jnp.uint32, array.shape, axis) * jnp.uint32(factor)
    mixed = (mixed ^ (mixed >> 15)) * jnp.uint32(0x2C1B3C6D)
    mixed ^= mixed >> 13
    bits = mixed.astype(f"uint{8 * array.dtype.itemsize}")
    return lax.bitcast_convert_type(bits, array.dtype)


@dataclasses.dataclass(frozen=True)
class Machine:
    """Machine that programs run on.

    Attributes:
        implementation: implementation of operations.
        device: memory of the device.
        host: host memory that the device reads; None uses the device's instead.
        extra_calls: additional calls of the longer program of a timing.
        repeats: number of timed runs of both; 0 runs them once without timing.
    """

    implementation: Implementation
    device: jax.sharding.Sharding
    host: jax.sharding.Sharding | None
    extra_calls: int = 1
    repeats: int = 0

    @classmethod
    def with_kernels(cls, device: Any, repeats: int = 0) -> "Machine":
        """Returns a GPU, or a device that stands in for one while programs are compiled."""
        memory = SingleDeviceSharding(device)
        host = SingleDeviceSharding(device, memory_kind=HOST_MEMORY)
        return cls("mosaic_gpu", memory, host, extra_calls=16, repeats=repeats)

    @classmethod
    def cpu(cls, implementation: Implementation) -> "Machine":
        """Returns the first CPU device."""
        return cls(implementation, SingleDeviceSharding(jax.devices("cpu")[0]), None)

    @property
    def compiler_options(self) -> dict[str, Any]:
        """XLA's options for every program."""
        (device,) = self.device.device_set
        return dict(GPU_COMPILER_OPTIONS) if device.platform == "gpu" else {}

    @property
    def kind(self) -> str:
        """Kind of the device."""
        (device,) = self.device.device_set
        return device.device_kind

    def memory(self, operand: Operand) -> jax.sharding.Sharding:
        """Returns the memory of an operand."""
        in_host = isinstance(operand, Large) and operand.in_host
        return self.host if in_host and self.host else self.device

    def filling(self, operand: Large) -> Callable[[], jax.Array]:
        """Returns the jitted function that computes the operand in its memory."""
        fill = functools.partial(operand.fill, operand.array)
        return jax.jit(fill, out_shardings=self.memory(operand))

    def place(self, operand: Operand) -> jax.Array:
        """Returns the operand in its memory."""
        if isinstance(operand, Large):
            return self.filling(operand)()
        # A copy, since the operand must outlive the donation.
        return jax.device_put(operand, self.device, may_alias=False)

    def keep(self, operand: Operand) -> jax.Array:
        """Returns the operand, not to be donated; a large one is computed only once."""
        return _kept(self, operand) if isinstance(operand, Large) else self.place(operand)


@functools.cache
def _kept(machine: Machine, operand: Large) -> jax.Array:
    return machine.place(operand)


@dataclasses.dataclass(frozen=True)
class Body:
    """Repeated part of a program.

    Attributes:
        call: the operation.
        state: operands that it updates in place.
        kept: other operands that stay the same from call to call.
        compiler_options: XLA's options by name.
    """

    call: Call
    state: Operands
    kept: Operands
    compiler_options: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def program(machine: Machine, body: Body) -> Callable[..., Any]:
    """Returns the jitted function of a body.

    It takes the donated state, the kept operands, the lists of each call and a zero, and returns
    the new state and the results of each call."""

    def cast(
        arrays: Sequence[jax.Array], operands: Sequence[Operand], to: Callable
    ) -> tuple[jax.Array, ...]:
        return tuple(
            array if machine.memory(operand) is machine.device else to(array)
            for array, operand in zip(arrays, operands, strict=True)
        )

    # Traced once for all calls.
    called, state = jax.jit(body.call), body.state

    def run(
        arrays: tuple[jax.Array, ...],
        others: tuple[jax.Array, ...],
        calls: tuple[tuple[jax.Array, ...], ...],
        zero: jax.Array,
    ) -> tuple[tuple[jax.Array, ...], list[tuple[jax.Array, ...]]]:
        arrays, others = cast(arrays, state, as_device), cast(others, body.kept, as_device)
        results: list[tuple[jax.Array, ...]] = []
        for lists in calls:
            if results and not state:
                lists = (*lists[:-1], lists[-1] + zero * _first_bits(results[-1][0]))
            outputs = called(*arrays, *others, *lists)
            arrays = outputs[: len(state)]
            results.append(outputs[len(state) :])
        return cast(arrays, state, as_host), results

    return jax.jit(
        run,
        donate_argnums=0,
        out_shardings=(tuple(map(machine.memory, state)), None),
        compiler_options=machine.compiler_options | dict(body.compiler_options),
    )


def _first_bits(array: jax.Array) -> jax.Array:
    bits = f"int{8 * array.dtype.itemsize}"
    return lax.bitcast_convert_type(array[(0,) * array.ndim], bits).astype(jnp.int32)


@dataclasses.dataclass(frozen=True, slots=True)
class Work:
    """Minimum work of an operation.

    Attributes:
        host_bytes: bytes over the host link.
        device_bytes: bytes read from device memory or written to it.
        flops: multiplications and additions on tensor cores.
    """

    host_bytes: int = 0
    device_bytes: int = 0
    flops: int = 0

    @property
    def bound(self) -> tuple[float, str]:
        """Returns the minimum seconds, and the resource that limits them."""
        return max(
            (self.host_bytes / 50e9, "host link, 50 GB/s"),
            (self.device_bytes / 4.3e12, "device memory, 4.3 TB/s"),
            (self.flops / 780e12, "tensor cores, 780 TFLOP/s"),
        )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """Calls of an operation, for each of its specs.

    Attributes:
        specs: specs by name.
        timed: names of the specs that are timed on a GPU. Those named "odd..." are checked.
        rehearsed: names of the specs that stand for both on a CPU.
        call: a spec's operation in one implementation, as a `Body` takes it.
        state: the first operands, updated in place.
        kept: other operands that stay the same from call to call.
        lists: operands that differ from call to call; without state, the last is of integers. Timed
            calls have full ones.
        work: minimum work of a call with full lists.
        tolerance: for an operation without state, the error bound of its first result, computed
            from kept operands and lists; None where no bit may differ.
        comparable: brings results into a form that can be compared.
    """

    specs: Mapping[str, Any]
    timed: tuple[str, ...]
    rehearsed: tuple[str, ...]
    call: Callable[[Any, Implementation], Call]
    state: Callable[[Any], Operands] = lambda spec: ()
    kept: Callable[[Any], Operands] = lambda spec: ()
    lists: Callable[[Any, Rng, bool], Operands]
    work: Callable[[Any], Work]
    tolerance: Callable[..., np.ndarray] | None = None
    comparable: Callable[[tuple[Any, ...]], tuple[Any, ...]] = lambda results: results

    def body(self, spec: Any, implementation: Implementation) -> Body:
        """Returns the repeated part of a spec's program."""
        return Body(self.call(spec, implementation), self.state(spec), self.kept(spec))

    @property
    def checked(self) -> tuple[str, ...]:
        """Names of the specs that are checked, besides the timed ones."""
        return tuple(name for name in self.specs if name.startswith("odd"))


class Chain:
    """Program on its machine, with its operands.

    Args:
        machine: where it runs.
        body: its repeated part.
    """

    def __init__(self, machine: Machine, body: Body) -> None:
        self.operands = (*body.state, *body.kept)
        self._machine = machine
        self._program = program(machine, body)
        self.state = tuple(map(machine.place, body.state))
        self._kept = tuple(map(machine.keep, body.kept))
        self._zero = machine.place(np.zeros((), np.int32))

    def place(self, calls: Sequence[Sequence[Operand]]) -> tuple[tuple[jax.Array, ...], ...]:
        """Returns the lists of several calls in their memory, for `run`."""
        return tuple(tuple(map(self._machine.place, lists)) for lists in calls)

    def run(self, calls: tuple[tuple[jax.Array, ...], ...]) -> list[tuple[jax.Array, ...]]:
        """Runs a call for each of `lists` and waits; returns the results of each without the
        state."""
        self.state, results = self._program(self.state, self._kept, calls, self._zero)
        jax.block_until_ready((self.state, results))
        return results


@dataclasses.dataclass(frozen=True)
class Samples:
    """Seconds of programs of one call, and of programs with `extra` calls more."""

    extra: int
    one: list[float]
    many: list[float]

    @property
    def seconds(self) -> float | None:
        """Median seconds of a call; None where nothing was measured."""
        if not self.one:
            return None
        return (statistics.median(self.many) - statistics.median(self.one)) / self.extra


def measure(
    machine: Machine, cases: Sequence[tuple[Chain, Sequence[Sequence[Operand]]]]
) -> list[Samples]:
    """Times chains in turns, each with one call and with `machine.extra_calls` more."""
    prepared = [(chain, chain.place(calls)) for chain, calls in cases]
    taken = [Samples(machine.extra_calls, [], []) for _ in cases]
    for chain, calls in prepared:
        # Compiles; later runs are measured.
        chain.run(calls)
        if machine.repeats:
            chain.run(calls[:1])
    for _ in range(machine.repeats):
        for (chain, calls), samples in zip(prepared, taken, strict=True):
            for number, seconds in ((1, samples.one), (len(calls), samples.many)):
                start = time.perf_counter()
                chain.run(calls[:number])
                seconds.append(time.perf_counter() - start)
    return taken
