"""Comparison of arrays by their bits."""

import jax
import numpy as np


def as_bits(array: jax.Array) -> np.ndarray:
    """An array's bytes, with those of an element on an axis of their own."""
    values = np.array(array)
    return values.view(np.uint8).reshape(*values.shape, values.itemsize)


def assert_same_bits(found: jax.Array, expected: jax.Array) -> None:
    assert found.dtype == expected.dtype
    np.testing.assert_array_equal(as_bits(found), as_bits(expected))
