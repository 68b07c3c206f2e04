"""Programs that compile in half the time, for tests of what runs them.

XLA's former emitters make machine code of a program at once, where the present ones set up a
compiler for each of its hundreds of fusions. Sums may be rounded otherwise, so tests of the model's
own arithmetic do without.
"""

from typing import Any

import jax
import pytest
from jax._src import compiler

from pallas_kernels.jax_internals import JAX_VERSION

_OPTION = "xla_cpu_disable_new_fusion_emitters"
FLAG = f"--xla_backend_extra_options={_OPTION}"
"""The same for all programs of a process, in its `XLA_FLAGS`."""

# It is an entry of a map, which jax has no way to set for one program.
_EXECUTABLE_BUILD_OPTIONS, _DEBUG_OPTIONS, _EXTRA_OPTIONS = 3, 3, 500
_KEY, _VALUE = 1, 2


def use_former_emitters(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has whatever is compiled from now on compiled by the former emitters."""
    assert jax.__version__ == JAX_VERSION, f"{__file__} uses private parts of jax {JAX_VERSION}"
    get_compile_options = compiler.get_compile_options
    entry = _field(_KEY, _OPTION.encode()) + _field(_VALUE, b"")
    debug_options = _field(_DEBUG_OPTIONS, _field(_EXTRA_OPTIONS, entry))
    # What is appended to a serialised message is merged with it.
    appended = _field(_EXECUTABLE_BUILD_OPTIONS, debug_options)

    def quick_options(*arguments: Any, **named: Any) -> Any:
        options: Any = get_compile_options(*arguments, **named)
        return type(options).ParseFromString(options.SerializeAsString() + appended)

    monkeypatch.setattr(compiler, "get_compile_options", quick_options)


def _field(number: int, content: bytes) -> bytes:
    """A field of a protocol buffer that holds bytes, text or a message."""
    return _varint(number << 3 | 2) + _varint(len(content)) + content


def _varint(number: int) -> bytes:
    low, rest = number & 127, number >> 7
    return bytes([low | 128]) + _varint(rest) if rest else bytes([low])
