"""Compiling for NVIDIA H200s on a machine that has none, and what the compiled program does.

The whole of XLA, Mosaic and ptxas runs: registers, spills, copies and aliasing are those of the
program that an H200 would run. Only what XLA would choose by trying it out on the GPU may differ:
tiles of plain matmuls, algorithms of sorts.
"""

import collections
import contextlib
import dataclasses
import functools
import os
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from jax.experimental import topologies

from pallas_kernels.common.compiler_options import GPU_COMPILER_OPTIONS
from pallas_kernels.common.implementation import override_implementation
from pallas_kernels.common.jax_internals import compile_lowered, num_devices
from scripts.aot.h200_target import h200_target
from scripts.aot.hlo_program import COLLECTIVES, HloProgram, Instruction

_KERNEL_TARGET = "mosaic_gpu_v2"
_HOST_MEMORY = "S(5)"
_BARRIER_BYTES = 8


@dataclasses.dataclass(frozen=True, slots=True)
class KernelReport:
    """Resources that a Pallas kernel takes of an H200.

    Attributes:
        name: of the kernel's function.
        registers: of a thread; an H200 has 255 at most.
        spilled_bytes: bytes of registers that a thread stores in memory for want of room.
        shared_bytes: shared memory of a block, barriers included.
    """

    name: str
    registers: int
    spilled_bytes: int
    shared_bytes: int


@dataclasses.dataclass(frozen=True, slots=True)
class Loop:
    """A loop of XLA's.

    Attributes:
        name: in the program.
        trip_count: how often it runs. Where it is None, the host reads back a flag before each
            turn.
        origin: names of transformations and of `jax.named_scope` around it.
    """

    name: str
    trip_count: int | None
    origin: str


@dataclasses.dataclass(frozen=True, slots=True)
class Collective:
    """Operations between devices that are alike.

    Attributes:
        kind: such as "all-gather".
        count: how often it runs.
        num_bytes: each time, the larger of what one device gives and gets.
    """

    kind: str
    count: int
    num_bytes: int


@dataclasses.dataclass(frozen=True, slots=True)
class MemoryReport:
    """Bytes of one device, in its own memory or in the host's.

    Attributes:
        argument_bytes: what the program takes.
        output_bytes: what it returns, the aliased included.
        aliased_bytes: arguments that are updated in place.
        temp_bytes: what it needs besides, at its peak.
    """

    argument_bytes: int
    output_bytes: int
    aliased_bytes: int
    temp_bytes: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CompileReport:
    """Report of a program on one H200 of those that it was compiled for.

    Attributes:
        kernels: its Pallas kernels; those of the same name and figures once.
        copies: lines of HLO that copy `min_copy_bytes` or more, anywhere in the program; also
            kernels that do nothing but transpose, which is how a layout is changed.
        host_parameters: names of the arguments that are read where they lie in host memory.
        launch_counts: how often each kind of operation is launched: a Pallas kernel under its
            name, a call into a library under its target, a kernel of XLA's as "fusion", others
            under their opcode. A loop's body counts as often as it runs, or once where that is not
            known; a conditional counts as its longest branch, a sort or a library call as one.
        launch_origins: the same launches, by where they are from (the names of transformations and
            scopes around an operation) and kind.
        loops: the loops that run.
        branches: the conditionals that run, whose predicate the host reads back, by their origin.
        collectives: what runs between devices, loops counted as in `launch_counts`.
        rematerialized: names of operations that XLA repeats to save memory.
        device: bytes in the device's memory.
        host: bytes in the host's.
    """

    kernels: tuple[KernelReport, ...]
    copies: list[str]
    host_parameters: tuple[str, ...]
    launch_counts: Mapping[str, int]
    launch_origins: Mapping[tuple[str, str], int]
    loops: tuple[Loop, ...]
    branches: tuple[str, ...]
    collectives: tuple[Collective, ...]
    rematerialized: tuple[str, ...]
    device: MemoryReport
    host: MemoryReport

    @property
    def launches(self) -> int:
        """All that is given to the device: kernels, copies, collectives, library calls."""
        return sum(self.launch_counts.values())

    @property
    def aliased_bytes(self) -> int:
        """Arguments updated in place, in both memories."""
        return self.device.aliased_bytes + self.host.aliased_bytes

    @property
    def temp_bytes(self) -> int:
        """Bytes needed besides arguments and outputs, in both memories."""
        return self.device.temp_bytes + self.host.temp_bytes


def compile_for_h200(
    function: Callable[..., Any],
    arguments: Sequence[Any],
    mesh: jax.sharding.Mesh | None = None,
    donate: Sequence[int] = (),
    out_shardings: Any = None,
    *,
    static: Mapping[str, Any] | None = None,
    compiler_options: Mapping[str, Any] | None = None,
    min_copy_bytes: int = 1024,
) -> CompileReport:
    """Compiles a function for as many H200s as its arguments are sharded over.

    Needs jax's CUDA plugin (`make setup-aot`) and `JAX_PLATFORMS=cpu`; no GPU, driver or toolkit.

    Args:
        function: what to compile, with kernels wherever they support the shapes. One that is
            already jitted keeps what it was jitted with, but for XLA's options, which are meant for
            the devices that stand in.
        arguments: trees of `jax.ShapeDtypeStruct`, sharded over CPU devices that stand in for the
            H200s (`JAX_NUM_CPU_DEVICES`). Those of memory kind "pinned_host" are in host memory.
        mesh: set while the function is traced.
        donate: numbers of the arguments that are donated.
        out_shardings: as for `jax.jit`. What stays in host memory must be named here.
        static: static arguments by name, of a function that is already jitted.
        compiler_options: XLA's options, by name, besides `GPU_COMPILER_OPTIONS`.
        min_copy_bytes: smaller copies are not reported.

    Raises:
        RuntimeError: the plugin or `JAX_PLATFORMS=cpu` is missing, or jax is of another version.
        ValueError: `donate` or `out_shardings` is given for a function that is already jitted.
    """
    if isinstance(function, jax.stages.Wrapped):
        if donate or out_shardings is not None:
            raise ValueError(
                f"donate={donate} and out_shardings={out_shardings} belong into the jax.jit that"
                f" {function} already went through"
            )
        jitted = function
    else:
        more = {} if out_shardings is None else {"out_shardings": out_shardings}
        jitted = jax.jit(function, donate_argnums=tuple(donate), **more)
    _check_platform()
    with (
        _mosaic_dump() as dump,
        override_implementation("mosaic_gpu"),
        jax.set_mesh(mesh) if mesh is not None else contextlib.nullcontext(),
    ):
        lowered = jitted.trace(*arguments, **(static or {})).lower(lowering_platforms=("cuda",))
        _discard_logs(dump)
        executable = compile_lowered(
            lowered,
            _topology(num_devices(lowered)).devices,
            dict(GPU_COMPILER_OPTIONS) | dict(compiler_options or {}),
        )
    (module,) = executable.hlo_modules()
    program = HloProgram.parse(module.to_string())
    return _report(program, executable.get_compiled_memory_stats(), dump, min_copy_bytes)


def _check_platform() -> None:
    # The plugin, when it may run programs itself, looks for libraries that compiling does not need.
    if (platforms := jax.config.values["jax_platforms"]) != "cpu":
        raise RuntimeError(
            f"JAX_PLATFORMS is {platforms!r}: set it to 'cpu' before jax is imported to compile"
            " for H200s that are not there"
        )


@functools.cache
def _topology(number: int) -> topologies.TopologyDescription:
    try:
        return topologies.get_topology_desc(
            platform="cuda", target_config=h200_target(), topology=f"1x1x{number}"
        )
    except NotImplementedError as error:
        raise RuntimeError(
            "jax's CUDA plugin is not installed in this environment: run `make setup-aot` and use"
            " .venv-aot/bin/python"
        ) from error


@functools.cache
def _dump_folder() -> tempfile.TemporaryDirectory[str]:
    """One for the whole process, as a kernel lowered or compiled before is not dumped anew."""
    return tempfile.TemporaryDirectory(prefix="h200-kernels-")


@contextlib.contextmanager
def _mosaic_dump() -> Iterator[Path]:
    """A folder to which Mosaic writes the figures of the kernels that it compiles meanwhile."""
    folder, variable = _dump_folder().name, "MOSAIC_GPU_DUMP_TO"
    before = os.environ.get(variable)
    os.environ[variable] = folder
    try:
        yield Path(folder)
    finally:
        if before is None:
            del os.environ[variable]
        else:
            os.environ[variable] = before


def _discard_logs(dump: Path) -> None:
    """Sends the megabytes that Mosaic logs of each lowered kernel's passes to nowhere."""
    for resources in dump.glob("*.resources.txt"):
        log = dump / f"{_dump_name(resources)}.mlir-passes.log"
        if not log.is_symlink():
            log.symlink_to(os.devnull)


def _dump_name(resources: Path) -> str:
    return resources.name.removesuffix(".resources.txt")


def _report(program: HloProgram, memory: Any, dump: Path, min_copy_bytes: int) -> CompileReport:
    dumped = {_dump_name(path) for path in dump.glob("*.resources.txt")}
    kernels: dict[KernelReport, None] = {}
    counts: collections.Counter[str] = collections.Counter()
    origins: collections.Counter[tuple[str, str]] = collections.Counter()
    collectives: collections.Counter[tuple[str, int]] = collections.Counter()
    for launch, times in program.launches():
        kind = launch.kind
        if launch.instruction and kind == _KERNEL_TARGET:
            kernel = _kernel_report(launch.instruction, dump, dumped)
            kernels[kernel] = None
            kind = kernel.name
        elif kind in COLLECTIVES:
            collectives[kind, launch.num_bytes] += times
        counts[kind] += times
        origins[launch.origin, kind] += times
    return CompileReport(
        kernels=tuple(kernels),
        copies=[str(each)[:400] for each in program.copies(min_copy_bytes)],
        host_parameters=tuple(
            each.argument
            for each in program.computations[program.entry]
            if each.opcode == "parameter" and _HOST_MEMORY in each.type
        ),
        launch_counts=dict(counts),
        launch_origins=dict(origins),
        loops=tuple(Loop(each.name, each.trip_count, each.origin) for each in program.loops()),
        branches=tuple(each.origin for each in program.branches()),
        collectives=tuple(
            Collective(kind, count, num_bytes) for (kind, num_bytes), count in collectives.items()
        ),
        rematerialized=tuple(each.name for each in program.instructions() if ".remat" in each.name),
        device=_memory_report(memory, ""),
        host=_memory_report(memory, "host_"),
    )


def _memory_report(memory: Any, prefix: str) -> MemoryReport:
    names = ("argument", "output", "alias", "temp")
    return MemoryReport(*(getattr(memory, f"{prefix}{name}_size_in_bytes") for name in names))


def _kernel_report(call: Instruction, dump: Path, dumped: set[str]) -> KernelReport:
    """The figures that Mosaic and ptxas gave of the kernel that is called.

    Its name in the dump is one of the strings in its code.
    """
    strings = set(re.findall(r"(?<=\\00)[\w.$-]+(?=\\00)", call.backend_config))
    try:
        (name,) = strings & dumped
        ptxas = (dump / f"{name}.ptxas").read_text()
        resources = (dump / f"{name}.resources.txt").read_text()
    except (ValueError, FileNotFoundError) as error:
        raise RuntimeError(f"Mosaic gave no figures of {call.name}") from error
    # ptxas has a line for each function of the kernel, and may warn of spills in another before.
    registers = max(_figures(r"Used (\d+) registers", ptxas))
    spilled = sum(_figures(r"stack frame, (\d+) bytes spill stores", ptxas))
    shared = sum(_figures(r"smem_scratch_bytes=(\d+)", resources))
    shared += sum(map(int, re.findall(r"(\d+) bytes smem", ptxas)))  # none if there is no need
    for number, times in re.findall(r"num_barriers=(\d+)[^)]*\): (\d+)", resources):
        shared += _BARRIER_BYTES * int(number) * int(times)
    return KernelReport(name.rpartition("_")[0], registers, spilled, shared)


def _figures(pattern: str, text: str) -> list[int]:
    """Numbers that a pattern finds.

    Raises:
        RuntimeError: it finds none, so that the text is of another form than is known here.
    """
    found = [int(number) for number in re.findall(pattern, text)]
    if not found:
        raise RuntimeError(f"no {pattern!r} in what Mosaic and ptxas say of a kernel: {text!r}")
    return found
