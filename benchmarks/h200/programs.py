"""Programs of one operation, once and many times over, for benchmarks/h200/kernels.py.

An operation takes `call(*state, *kept, *lists)` and returns the new state, which is updated in
place, and then its other results. A program calls it once for each of several lists.

A program's time has the launch from Python, the transfer of a flag and the wait in it, which take
longer than most operations here. So programs of one call and of many are run in turns, and the time
of a call is what the additional ones take. Calls follow from each other: by the state that they
hand on, or, where there is none, by a zero times a result that is added to the next call's last
list, for which XLA launches one more small kernel.
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
    """An operand that is computed where it is needed, the same wherever that is.

    Attributes:
        array: its shape and dtype.
        fill: computes it from those.
        in_host: whether it lies in host memory.
    """

    array: jax.ShapeDtypeStruct
    fill: Callable[[jax.ShapeDtypeStruct], jax.Array]
    in_host: bool = False


Operand = jax.Array | np.ndarray | Large
Operands = tuple[Operand, ...]
Rng = np.random.Generator


def scattered_bits(array: jax.ShapeDtypeStruct) -> jax.Array:
    """Bits that follow from the indices, and differ from place to place."""
    mixed = jnp.uint32(0x9E3779B9)
    for axis, factor in enumerate((0x85EBCA6B, 0xC2B2AE35, 0x27D4EB2F, 0x165667B1)[: array.ndim]):
        mixed += lax.broadcasted_iota(jnp.uint32, array.shape, axis) * jnp.uint32(factor)
    mixed = (mixed ^ (mixed >> 15)) * jnp.uint32(0x2C1B3C6D)
    mixed ^= mixed >> 13
    bits = mixed.astype(f"uint{8 * array.dtype.itemsize}")
    return lax.bitcast_convert_type(bits, array.dtype)


@dataclasses.dataclass(frozen=True)
class Machine:
    """Where programs run.

    Attributes:
        implementation: what an operation runs there.
        device: the device's memory.
        host: host memory that the device reads; None takes the device's in its place.
        extra_calls: calls by which the longer program of a timing exceeds the shorter.
        repeats: how often both are run; 0 where times mean nothing, for once without timing.
    """

    implementation: Implementation
    device: jax.sharding.Sharding
    host: jax.sharding.Sharding | None
    extra_calls: int = 1
    repeats: int = 0

    @classmethod
    def with_kernels(cls, device: Any, repeats: int = 0) -> "Machine":
        """A GPU, or a device that stands in for one while programs are compiled."""
        memory = SingleDeviceSharding(device)
        host = SingleDeviceSharding(device, memory_kind=HOST_MEMORY)
        return cls("mosaic_gpu", memory, host, extra_calls=16, repeats=repeats)

    @classmethod
    def cpu(cls, implementation: Implementation) -> "Machine":
        """The first CPU device."""
        return cls(implementation, SingleDeviceSharding(jax.devices("cpu")[0]), None)

    @property
    def compiler_options(self) -> dict[str, Any]:
        """XLA's options for every program."""
        (device,) = self.device.device_set
        return dict(GPU_COMPILER_OPTIONS) if device.platform == "gpu" else {}

    @property
    def kind(self) -> str:
        """What the device is."""
        (device,) = self.device.device_set
        return device.device_kind

    def memory(self, operand: Operand) -> jax.sharding.Sharding:
        """Where an operand lies."""
        in_host = isinstance(operand, Large) and operand.in_host
        return self.host if in_host and self.host else self.device

    def filling(self, operand: Large) -> Callable[[], jax.Array]:
        """The jitted function that returns the operand, in its memory."""
        fill = functools.partial(operand.fill, operand.array)
        return jax.jit(fill, out_shardings=self.memory(operand))

    def place(self, operand: Operand) -> jax.Array:
        """The operand, in its memory."""
        if isinstance(operand, Large):
            return self.filling(operand)()
        # What is donated must not be the operand itself.
        return jax.device_put(operand, self.device, may_alias=False)

    def keep(self, operand: Operand) -> jax.Array:
        """The operand, not to be donated; a large one is placed once for all."""
        return _kept(self, operand) if isinstance(operand, Large) else self.place(operand)


@functools.cache
def _kept(machine: Machine, operand: Large) -> jax.Array:
    return machine.place(operand)


@dataclasses.dataclass(frozen=True)
class Body:
    """What a program repeats.

    Attributes:
        call: the operation.
        state: what it updates in place.
        kept: what else stays the same from call to call.
        compiler_options: XLA's, by name.
    """

    call: Call
    state: Operands
    kept: Operands
    compiler_options: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def program(machine: Machine, body: Body) -> Callable[..., Any]:
    """The jitted function of the state, which is donated, what is kept, the lists of each call and
    a zero, that returns the new state and the results of each call."""

    def cast(
        arrays: Sequence[jax.Array], operands: Sequence[Operand], to: Callable
    ) -> tuple[jax.Array, ...]:
        return tuple(
            array if machine.memory(operand) is machine.device else to(array)
            for array, operand in zip(arrays, operands, strict=True)
        )

    # Traced once, however often it is called.
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
    """What an operation must do at least.

    Attributes:
        host_bytes: bytes over the host link.
        device_bytes: bytes that are read from the device's memory or written to it.
        flops: multiplications and additions on tensor cores.
    """

    host_bytes: int = 0
    device_bytes: int = 0
    flops: int = 0

    @property
    def bound(self) -> tuple[float, str]:
        """Least seconds, and what binds."""
        return max(
            (self.host_bytes / 50e9, "host link, 50 GB/s"),
            (self.device_bytes / 4.3e12, "device memory, 4.3 TB/s"),
            (self.flops / 780e12, "tensor cores, 780 TFLOP/s"),
        )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """How an operation is run, for each of its specs.

    Attributes:
        specs: by name.
        timed: names of those that are timed on a GPU. All whose names begin with "odd" are checked.
        rehearsed: names of those that stand for both on a CPU.
        call: a spec's operation in one implementation, as a `Body` has it.
        state: operands that it updates in place, its first.
        kept: other operands that stay the same from call to call.
        lists: operands that each call has its own of; without state, the last is of integers. Full
            ones list as much as they can, as those that are timed do.
        work: what a call with full lists does.
        tolerance: of an operation without state, how far its first result, in kept and lists, may
            be from the reference; None where no bit may differ.
        comparable: results in a form that is compared.
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
        """What a program of a spec's operation repeats."""
        return Body(self.call(spec, implementation), self.state(spec), self.kept(spec))

    @property
    def checked(self) -> tuple[str, ...]:
        """Names of the specs whose values are checked, besides those that are timed."""
        return tuple(name for name in self.specs if name.startswith("odd"))


class Chain:
    """A program on its machine, with its operands.

    Args:
        machine: where it runs.
        body: what it repeats.
    """

    def __init__(self, machine: Machine, body: Body) -> None:
        self.operands = (*body.state, *body.kept)
        self._machine = machine
        self._program = program(machine, body)
        self.state = tuple(map(machine.place, body.state))
        self._kept = tuple(map(machine.keep, body.kept))
        self._zero = machine.place(np.zeros((), np.int32))

    def place(self, calls: Sequence[Sequence[Operand]]) -> tuple[tuple[jax.Array, ...], ...]:
        """Lists of several calls, for `run`."""
        return tuple(tuple(map(self._machine.place, lists)) for lists in calls)

    def run(self, calls: tuple[tuple[jax.Array, ...], ...]) -> list[tuple[jax.Array, ...]]:
        """Runs a call for each lists, to their end; returns the results of each but the state."""
        self.state, results = self._program(self.state, self._kept, calls, self._zero)
        jax.block_until_ready((self.state, results))
        return results


@dataclasses.dataclass(frozen=True)
class Samples:
    """Seconds of programs of one call, and of `extra` calls more."""

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
    """Times chains, each on its lists of one call and `machine.extra_calls`, all in turns."""
    prepared = [(chain, chain.place(calls)) for chain, calls in cases]
    taken = [Samples(machine.extra_calls, [], []) for _ in cases]
    for chain, calls in prepared:
        # Compiles; what follows is measured.
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
