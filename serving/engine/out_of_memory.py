"""Explanation of a store, or a state of sampling, that memory has no room for."""

import contextlib
from collections.abc import Iterator

import jax

from kvcache.geometry import KVGeometry
from serving.options.engine_options import EngineOptions
from serving.sampling.state import SamplingState


@contextlib.contextmanager
def explained_out_of_memory(
    options: EngineOptions, geometry: KVGeometry, vocab_size: int, *, on_cpu: bool
) -> Iterator[None]:
    """Names the options that make an engine smaller where its memory is allocated in vain.

    Args:
        options: what the caller chose.
        geometry: sizes of the store that they come to.
        vocab_size: ids of the model.
        on_cpu: whether the devices are CPUs, where no share of memory is set.

    Raises:
        ValueError: in place of an error for want of memory, which is its cause.
    """
    try:
        yield
    except (MemoryError, jax.errors.JaxRuntimeError) as error:
        if not isinstance(error, MemoryError) and "RESOURCE_EXHAUSTED" not in str(error):
            raise
        sampling_bytes = geometry.num_devices * SamplingState.num_bytes(
            geometry.max_sequences, vocab_size
        )
        host = f" and {_gib(geometry.host_bytes)} in host memory" if geometry.host_pages else ""
        raise ValueError(
            f"the engine does not fit in memory: the KV store takes {_gib(geometry.device_bytes)} "
            f"on the devices{host}, the sampling state {_gib(sampling_bytes)}: lower "
            f"{_names_of_sizes(options, geometry, on_cpu)}"
        ) from error


def _names_of_sizes(options: EngineOptions, geometry: KVGeometry, on_cpu: bool) -> str:
    """The options that a smaller value would help, with those values that were set."""
    names = []
    if options.device_pages is not None:
        names.append("device_pages")
    elif not on_cpu:
        names.append("memory_fraction")
    if geometry.host_pages:
        names.append("host_memory_gib")
    names += ["max_num_seqs", "max_model_len"]
    given = {name: getattr(options, name) for name in names}
    shown = [name if value is None else f"{name} ({value})" for name, value in given.items()]
    return f"{', '.join(shown[:-1])} or {shown[-1]}"


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.3g} GiB"
