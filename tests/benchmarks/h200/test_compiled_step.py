"""Copies of the state in a report, recognised without compiling anything."""

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from benchmarks.h200.compiled_step import copies_of_arguments
from glm53.model.sharding import make_mesh


def copies(*lines: str) -> list[str]:
    """Those of one device's part, [3, 10, 8, 20], of a slab that are copies of it."""
    sharding = NamedSharding(make_mesh(2), PartitionSpec(None, None, "model"))
    slab = jax.ShapeDtypeStruct((3, 10, 16, 20), jnp.int32, sharding=sharding)
    step: Any = SimpleNamespace(arguments=(slab,))
    report: Any = SimpleNamespace(copies=list(lines))
    return copies_of_arguments(step, report)


def test_copies_of_arguments() -> None:
    """A store that is copied whole, in another shape or layer by layer, and not noticed."""
    whole = "%copy.1 = s32[3,10,8,20]{3,2,1,0} copy(%slab)"
    reshaped = "%copy-start.2 = (s32[240,20]{1,0}, s32[240,20]{1,0}, u32[]) copy-start(%slab)"
    layer = "%transpose.3 = s32[8,10,20]{2,1,0} transpose(%slice), dimensions={1,0,2}"
    other_type = "%copy.4 = f32[3,10,8,20]{3,2,1,0} copy(%scores)"
    other_size = "%copy.5 = s32[3,10,16,20]{3,2,1,0} copy(%ids)"
    assert copies(whole, reshaped, layer, other_type, other_size) == [whole, reshaped, layer]
    with pytest.raises(ValueError, match="not a copy"):
        copies("%tuple.6 = () tuple()")
