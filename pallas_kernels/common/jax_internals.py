"""Private parts of jax that the project uses, and the version in which they are known.

jax's persistent cache keeps a program whose writing has failed half-way: each later process would
find it damaged, compile anew, and warn. Of a disk that is full it warns once a program.

jax's public topologies describe devices that are not there, but give them no host memory. So a
program is traced and lowered over CPU devices, and then compiled by the topology's client. Nor does
jax say whether it has read what its environment says of host memory.
"""

import contextlib
import functools
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

logger = logging.getLogger(__name__)

JAX_VERSION = "0.11.2"
"""The version whose private parts are used here."""


def backends_are_initialized() -> bool:
    """Whether jax has begun to use devices, after which it reads no more of its environment.

    Raises:
        RuntimeError: this is another version of jax.
    """
    _check_version()
    from jax._src import xla_bridge

    return xla_bridge.backends_are_initialized()


def num_devices(lowered: jax.stages.Lowered) -> int:
    """Number of devices that a lowered program runs on.

    Raises:
        RuntimeError: this is another version of jax.
    """
    _check_version()
    return lowered._lowering.compile_args["num_devices"]


def compile_lowered(
    lowered: jax.stages.Lowered,
    devices: Sequence[Any],
    compiler_options: Mapping[str, Any],
) -> Any:
    """Compiles a program for devices that are not there, in place of those it was traced with.

    Args:
        lowered: the program, lowered for the platform of `devices`.
        devices: all devices of a topology.
        compiler_options: XLA's options, by name, in place of those given to `jax.jit`.

    Returns:
        What `jax.stages.Compiled.runtime_executable` would give. It cannot be run.

    Raises:
        RuntimeError: this is another version of jax.
    """
    _check_version()
    # Other versions may lack them, and are to be refused by the check.
    from jax._src import compiler
    from jax._src.interpreters import pxla
    from jaxlib import xla_client

    lowering: Any = lowered._lowering
    arguments = lowering.compile_args
    options = compiler.get_compile_options(
        num_replicas=1,
        num_partitions=len(devices),
        device_assignment=np.arange(len(devices))[None],
        env_options_overrides=dict(compiler_options),
    )
    # Without this, outputs of unspecified sharding would be gathered on every device.
    to_parameters, to_outputs = pxla.get_prop_to_input_output(
        arguments["in_shardings"], arguments["out_shardings"], len(arguments["ordered_effects"])
    )
    build_options = options.executable_build_options
    build_options.allow_spmd_sharding_propagation_to_parameters = list(to_parameters)
    build_options.allow_spmd_sharding_propagation_to_output = list(to_outputs)
    return devices[0].client.compile(
        lowered.compiler_ir(),
        executable_devices=xla_client.DeviceList(tuple(devices)),
        compile_options=options,
    )


def keep_programs_whole() -> None:
    """Has jax's persistent cache remove programs that are torn, and stop at a full disk.

    A cache in which jax has looked already stays as it is.

    Raises:
        RuntimeError: this is another version of jax.
    """
    _check_version()
    from jax._src import compilation_cache

    module: Any = compilation_cache
    module.LRUCache = _whole_programs()


@functools.cache
def _whole_programs() -> type:
    """jax's cache of files, of whole ones only."""
    from jax._src import compilation_cache
    from jax._src.lru_cache import _CACHE_SUFFIX, LRUCache

    class WholePrograms(LRUCache):
        failed = False

        def get(self, key: str) -> bytes | None:
            program = super().get(key)
            if program is None:
                return None
            try:
                compilation_cache.decompress_executable(program)
            except Exception:  # Each compression has its own error.
                self._remove(key)
                return None
            return program

        def put(self, key: str, value: bytes) -> None:
            if self.failed:
                return
            try:
                super().put(key, value)
            except OSError as error:
                self.failed = True
                self._remove(key)
                logger.warning(
                    "compiled programs are no longer kept in %s: %s", self.path, error.strerror
                )

        def _remove(self, key: str) -> None:
            with contextlib.suppress(OSError):
                (self.path / f"{key}{_CACHE_SUFFIX}").unlink()

    return WholePrograms


def _check_version() -> None:
    if jax.__version__ != JAX_VERSION:
        raise RuntimeError(
            f"jax {jax.__version__} is installed, and pallas_kernels/common/jax_internals.py uses "
            f"private parts of jax {JAX_VERSION}: install that, or revise the file and its "
            "JAX_VERSION"
        )
