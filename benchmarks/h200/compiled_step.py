"""Report on GLM-5.3's decode step, compiled for eight H200s without any.

The store has the sizes that an engine would choose on such a node. Arguments are shapes only, so
the whole model compiles in the memory of a laptop. The program is the one that eight H200s would
run, except that LLVM does not optimise XLA's own kernels here, to save time.

usage: .venv-aot/bin/python -m benchmarks.h200.compiled_step [--whole] [--batch N ...] [--rows N]
"""

import argparse
import collections
import dataclasses
import functools
import math
import re
import resource
import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from glm53.model.config import GLMConfig
from glm53.model.kv_geometry import kv_geometry
from glm53.model.params import abstract_model
from glm53.model.presets import preset
from glm53.model.sharding import make_mesh, parameter_shardings
from glm53.model.steps import PrefillBatch, Steps
from kvcache import KVGeometry, KVStore, SequenceState
from scripts.aot.aot import CompileReport, Loop, compile_for_h200
from serving.options.engine_options import (
    MEMORY_FRACTION,
    EngineOptions,
    resolve_numerics,
)
from serving.options.store_options import resolve_geometry

NUM_DEVICES = 8
DEVICE_BYTES = 140 << 30
"""Memory of an H200 available to a program."""
HOST_GIB = 1024
"""Memory of the machine available to the store."""
MAX_MODEL_LEN = 1 << 20
BATCHES = (8, 32)
ROWS = 4
"""Rows of a sequence in a step: a token and three drafts."""
LEAST_COPY = 1 << 20
"""Size of the smallest copy reported, in bytes."""

PARTS = ("project", "append", "select", "resolve", "attend", "output", "dense", "experts")
"""Named scopes of a decoder layer."""

_WRAPPERS = ("jit(_sharded)", "shard_map", "eval_jaxpr", "body")
_HLO_TYPES = {
    "bfloat16": "bf16",
    "bool": "pred",
    "float32": "f32",
    "float8_e4m3fn": "f8e4m3fn",
    "int16": "s16",
    "int32": "s32",
}


@dataclasses.dataclass(frozen=True)
class DecodeStep:
    """Decode step to compile.

    Attributes:
        steps: the engine's steps.
        batch: number of sequences.
        rows: token rows of each sequence.
        arguments: shapes of parameters, store, sequences and tokens.
    """

    steps: Steps
    batch: int
    rows: int
    arguments: tuple[Any, ...]

    @property
    def num_layers(self) -> int:
        """Number of layers whose rows are stored."""
        return self.steps.geometry.num_layers

    @property
    def state(self) -> list[jax.ShapeDtypeStruct]:
        """Donated arguments."""
        return jax.tree.leaves(self.arguments[1:3])

    @property
    def state_bytes(self) -> int:
        """Donated bytes of one device, in both memories."""
        return sum(map(local_bytes, self.state))

    def compile(self) -> CompileReport:
        """Compiles the step for eight H200s."""
        return compile_for_h200(
            self.steps.prefill,
            self.arguments,
            static={"context_pages": self.steps.geometry.max_pages_per_sequence},
            compiler_options={"xla_backend_optimization_level": 0},
            min_copy_bytes=LEAST_COPY,
        )


def glm_config(whole: bool) -> GLMConfig:
    """Returns GLM-5.3 in FP8 as an engine runs it, or a model of four of its layers.

    The four layers have a scanned pattern, both kinds of attention and both kinds of MLP.
    """
    config = resolve_numerics(preset("glm-5.3"), "auto", None, "auto", on_cpu=False)
    if whole:
        return config
    return config.replace(
        num_hidden_layers=4,
        indexer_types=("full", "shared") * 2,
        mlp_layer_types=("sparse", "dense") * 2,
    )


def node_geometry(config: GLMConfig, batch: int, with_mtp: bool = True) -> KVGeometry:
    """Returns the store of a node of eight H200s with sequences of up to 1M tokens.

    A shortened model has as many pages as the whole one.
    """
    mesh, whole = make_mesh(NUM_DEVICES), glm_config(whole=True)

    def one_page(config: GLMConfig) -> KVGeometry:
        return kv_geometry(
            config,
            row_kind="fp8",
            device_pages=1,
            max_model_len=MAX_MODEL_LEN,
            max_sequences=max(batch, min(BATCHES)),
            num_devices=NUM_DEVICES,
            with_mtp=with_mtp,
        )

    weights = sum(map(local_bytes, jax.tree.leaves(abstract_parameters(whole, mesh))))
    free = int(DEVICE_BYTES * MEMORY_FRACTION) - weights
    device_pages, _ = one_page(whole).pages_within(NUM_DEVICES * free, HOST_GIB << 30)
    options = EngineOptions(device_pages=device_pages, host_memory_gib=HOST_GIB)
    geometry = resolve_geometry(one_page(whole), options, 0, mesh, config.index_topk)
    return dataclasses.replace(geometry, group_layers=one_page(config).group_layers)


def decode_step(config: GLMConfig, geometry: KVGeometry, batch: int, rows: int) -> DecodeStep:
    """Returns the step that appends `rows` tokens to each of `batch` sequences."""
    mesh = make_mesh(NUM_DEVICES)
    tokens = PrefillBatch(
        jnp.zeros((batch,), jnp.int32),
        jnp.zeros((batch,), jnp.int32),
        jnp.zeros((batch, rows), jnp.int32),
    )
    arguments = (
        abstract_parameters(config, mesh),
        *abstract_state(config, geometry, mesh),
        replicated(tokens, mesh),
    )
    steps = Steps(config, geometry, mesh, single_scan=False)
    return DecodeStep(steps, batch, rows, arguments)


def abstract_parameters(config: GLMConfig, mesh: Mesh) -> Any:
    """Returns the shapes of the parameters."""
    _, parameters = abstract_model(config)
    return jax.tree.map(_with_sharding, parameters, parameter_shardings(parameters, mesh))


def abstract_state(
    config: GLMConfig, geometry: KVGeometry, mesh: Mesh
) -> tuple[KVStore, SequenceState]:
    """Returns the shapes of the store and of the sequences in it."""
    store = jax.eval_shape(functools.partial(KVStore.create, geometry, mesh))
    sequences = jax.eval_shape(
        functools.partial(
            SequenceState.create, geometry, config.hidden_size, config.compute_dtype, mesh
        )
    )
    shardings = KVStore.shardings(geometry, mesh)
    return jax.tree.map(_with_sharding, store, shardings), replicated(sequences, mesh)


def replicated(tree: Any, mesh: Mesh) -> Any:
    """Returns the shapes of replicated arrays."""
    everywhere = NamedSharding(mesh, PartitionSpec())
    return jax.tree.map(lambda array: _with_sharding(array, everywhere), tree)


def _with_sharding(array: Any, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding)


def local_bytes(array: jax.Array | jax.ShapeDtypeStruct) -> int:
    """Returns the bytes of an array on one device."""
    assert array.sharding is not None
    return math.prod(array.sharding.shard_shape(array.shape)) * array.dtype.itemsize


def copies_of_arguments(step: DecodeStep, report: CompileReport) -> list[str]:
    """Returns the copies in a report that are as large as a parameter or a field of the state, or
    as one layer of it."""
    sizes = set()
    for array in jax.tree.leaves(step.arguments):
        elements = local_bytes(array) // array.dtype.itemsize
        name = _HLO_TYPES[str(array.dtype)]
        sizes |= {(name, elements), (name, elements // max(array.shape[0], 1))}
    return [copy for copy in report.copies if _copied(copy) in sizes]


def _copied(copy: str) -> tuple[str, int]:
    """Returns the element type and the number of elements that a line of HLO copies."""
    found = re.search(r" = \(?(\w+)\[([\d,]*)\]", copy)
    if found is None:
        raise ValueError(f"not a copy in HLO: {copy}")
    return found[1], math.prod(map(int, filter(None, found[2].split(","))))


def loops_read_back(report: CompileReport) -> list[Loop]:
    """Returns the loops whose condition the host reads back in each iteration."""
    return [loop for loop in report.loops if loop.trip_count is None]


def launches_by_part(report: CompileReport) -> dict[str, collections.Counter[str]]:
    """Returns the launches of each part of a layer by kind, those of the largest part first; what
    belongs to none is under "other"."""
    parts: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for (origin, kind), count in report.launch_origins.items():
        inner = [scope for scope in origin.split("/") if scope in PARTS]
        parts[inner[-1] if inner else "other"][kind] += count
    return dict(sorted(parts.items(), key=lambda item: -item[1].total()))


def _summary(copy: str) -> str:
    """Returns what is copied and where, the same for like copies."""
    array, scope = re.search(r" = (\S+?)\{", copy), re.search(r'op_name="([^"]*)"', copy)
    kind = re.search(r"\} (\w+)\(%([a-z_]+)", copy)
    return " ".join(
        [
            *(kind.groups() if kind else ()),
            array[1] if array else copy[:80],
            *([_scope(scope[1])] if scope else ()),
        ]
    )


def _scope(origin: str) -> str:
    """Returns the part of a layer that an operation belongs to, and the operation."""
    parts = [part for part in origin.split("/") if part not in _WRAPPERS]
    return "/".join(parts)


def describe(step: DecodeStep, report: CompileReport, seconds: float) -> Iterator[str]:
    """Describes a compiled step, line by line."""
    gib = 2**30
    geometry = step.steps.geometry
    yield (
        f"## {step.num_layers} layers, batch {step.batch}, {step.rows} rows a sequence, pages: "
        f"{geometry.device_pages} on the devices, {geometry.host_pages} in host memory"
    )
    yield f"compiled in {seconds:.0f} s"
    yield (
        f"arguments {report.device.argument_bytes / gib:.2f} GiB a device, "
        f"{report.host.argument_bytes / gib:.2f} GiB in host memory"
    )
    yield (
        f"state in both memories {step.state_bytes / gib:.2f} GiB a device, updated in place "
        f"{report.aliased_bytes / gib:.2f} GiB"
    )
    yield (
        f"temporaries {report.device.temp_bytes / 2**20:.0f} MiB, in host memory "
        f"{report.host.temp_bytes}"
    )
    yield f"read in host memory: {', '.join(report.host_parameters)}"
    yield f"computed twice: {len(report.rematerialized)}"
    yield f"copies of parameters or state: {len(copies_of_arguments(step, report))}"
    yield f"copies of 1 MiB or more: {len(report.copies)}"
    alike = collections.Counter(_summary(copy) for copy in report.copies)
    yield from (f"  {count} x {copy}" for copy, count in alike.items())
    yield f"branches: {len(report.branches)}"
    yield from sorted({f"  {_scope(origin)}" for origin in report.branches})
    read_back = loops_read_back(report)
    yield f"loops whose condition is read back: {len(read_back)}"
    yield from sorted({f"  {_scope(loop.origin)}" for loop in read_back})
    launches = report.launches
    yield f"launches {launches}, {launches / step.num_layers:.0f} a layer"
    for part, kinds in launches_by_part(report).items():
        listed = ", ".join(f"{count} {kind}" for kind, count in kinds.most_common())
        yield f"  {part} {kinds.total()}: {listed}"
    total = sum(each.count * each.num_bytes for each in report.collectives)
    yield f"collectives: {total / 2**20:.1f} MiB"
    yield from (
        f"  {each.count} {each.kind} of {each.num_bytes} bytes" for each in report.collectives
    )
    yield "kernels: registers, bytes spilled, shared memory"
    yield from (
        f"  {each.name} {each.registers} {each.spilled_bytes} {each.shared_bytes}"
        for each in report.kernels
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Compiles the step and prints the report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--whole",
        action="store_true",
        help="all 78 layers and the MTP layer, instead of four layers",
    )
    parser.add_argument(
        "--batch", type=int, nargs="+", default=BATCHES, help="numbers of sequences"
    )
    parser.add_argument("--rows", type=int, default=ROWS, help="token rows of each sequence")
    options = parser.parse_args(arguments)
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", NUM_DEVICES)
    config = glm_config(options.whole)
    for batch in options.batch:
        step = decode_step(config, node_geometry(config, batch), batch, options.rows)
        start = time.perf_counter()
        report = step.compile()
        seconds = time.perf_counter() - start
        print("\n".join(describe(step, report, seconds)), flush=True)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(f"peak memory {peak / 2**20:.2f} GiB")


if __name__ == "__main__":
    main()
