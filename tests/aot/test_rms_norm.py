import functools

import pytest

from pallas_kernels.rms_norm import rms_norm
from pallas_kernels.rms_norm.specs import SPECS
from scripts.aot.aot import compile_for_h200
from tests.aot.slabs import argument, check_kernel, integers


@pytest.mark.parametrize("name", [name for name in SPECS if name.startswith("glm")])
def test_rms_norm(name: str) -> None:
    """A kernel that spills, or more than one launch for the sum, the norm and the rounding."""
    spec = SPECS[name]
    rows, weights = argument(spec.rows), argument(spec.weights)
    report = compile_for_h200(
        functools.partial(rms_norm, eps=1e-5, quantized=True), (rows, rows, weights, integers())
    )
    (kernel,) = report.kernels
    check_kernel(kernel, "rms_norm", 128)
    assert report.copies == []
    assert report.launch_counts == {"rms_norm": 1}
