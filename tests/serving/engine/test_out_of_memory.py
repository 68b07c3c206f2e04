"""Engines that memory has no room for, which only the allocation finds out."""

import jax
import pytest

from glm53 import LLM

pytestmark = pytest.mark.compiles


@pytest.mark.parametrize(
    "error", [jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: 9 bytes"), MemoryError()]
)
def test_sizes_are_named(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error that names no option, or only some."""

    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr("serving.engine.engine.ModelRunner", fail)
    message = (
        r"the KV store takes 641 GiB on the devices, the sampling state 0.00758 GiB: lower "
        r"device_pages \(3000000\), max_num_seqs \(256\) or max_model_len$"
    )
    with pytest.raises(ValueError, match=message) as caught:
        LLM(device_pages=3_000_000)
    assert caught.value.__cause__ is error
    message = r"GiB in host memory, .* lower host_memory_gib, max_num_seqs \(9000\) or max_model"
    with pytest.raises(ValueError, match=message):
        LLM(max_num_seqs=9000)


def test_other_errors_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault that is told as a lack of memory."""

    def fail(*_: object) -> None:
        raise jax.errors.JaxRuntimeError("INTERNAL: broken")

    monkeypatch.setattr("serving.engine.engine.ModelRunner", fail)
    with pytest.raises(jax.errors.JaxRuntimeError, match="broken"):
        LLM()
