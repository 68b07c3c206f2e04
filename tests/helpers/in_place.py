"""Checks that compiled code updates large arrays in place."""

import math
import re
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

# What may have the size of a slab in compiled code: names for it, and writes of rows into it.
_NAMES = {
    "parameter",
    "tuple",
    "get-tuple-element",
    "bitcast",
    "while",
    "call",
    "conditional",
    "fusion",
    "opt-barrier",
}
_WRITES = {"scatter", "dynamic-update-slice"}


def large_operations(hlo: str, least_elements: int) -> Iterator[tuple[str, str]]:
    """Yields what gives arrays of that size, in any computation, loop bodies included."""
    result = re.compile(r"\s*(?:ROOT )?%?[\w.-]+ = \(?\w+\[([\d,]*)\]\S* (?:.*?\) )?([\w-]+)\(")
    for line in hlo.splitlines():
        found = result.match(line)
        if found and math.prod(map(int, filter(None, found[1].split(",")))) >= least_elements:
            yield found[2], line.strip()[:160]


def check_in_place(compiled: jax.stages.Compiled, arrays: Sequence[jax.Array]) -> None:
    """Asserts that compiled code updates these arrays, which it takes donated, where they lie."""
    shards = [array.addressable_shards[0].data for array in arrays]
    smallest = min(shard.nbytes for shard in shards)
    operations = list(
        large_operations(compiled.as_text() or "", min(shard.size for shard in shards))
    )
    names = {name for name, _ in operations}
    assert "parameter" in names
    assert names & _WRITES
    assert not [line for name, line in operations if name not in _NAMES | _WRITES]
    memory: Any = compiled.memory_analysis()
    aliased = memory.alias_size_in_bytes + memory.host_alias_size_in_bytes
    assert aliased >= sum(shard.nbytes for shard in shards)
    assert memory.temp_size_in_bytes + memory.host_temp_size_in_bytes < smallest / 2


def pointers(*arrays: jax.Array) -> list[int]:
    return [
        shard.data.unsafe_buffer_pointer() for array in arrays for shard in array.addressable_shards
    ]


def fetch_copy(array: jax.Array) -> np.ndarray:
    """Returns an array's values; what numpy has looked at itself can no longer be donated."""
    on_device = jax.device_put(array, array.sharding.with_memory_kind("device"))
    return np.array(jnp.copy(on_device))
