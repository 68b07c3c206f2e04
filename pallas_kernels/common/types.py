"""Types that operations share: stored rows, indices, and what a kernel is given."""

from typing import Any

from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Int, Shaped

Slab = Shaped[Array, "layers device_pages rows_per_page width"]
"""Rows on the device, in their row format."""

HostSlab = Shaped[Array, "host_pages rows_per_page layers width"]
"""Rows in host memory, a row's layers side by side."""

Scalar = int | Int[Array, ""]
"""An index or a count, known when tracing or not."""

Interpret = plgpu.InterpretGPUParams | None
"""Interpreter of a kernel; None compiles it."""

Ref = Any
"""Reference to memory inside a kernel, of which Pallas has no public type."""
