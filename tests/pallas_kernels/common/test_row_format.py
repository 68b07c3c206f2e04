import functools
import itertools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pallas_kernels.common.row_format import ROW_KINDS, RowFormat, RowKind, power_of_two_scale

pytestmark = pytest.mark.compiles
LEAST_ROW_SCALE, LEAST_KEY_SCALE = 1e-4, 1e-4 / 448
GLM_ROW, GLM_KEY = (512, 64, LEAST_ROW_SCALE), (128, 0, LEAST_KEY_SCALE)
# A full group and a started one.
ROW = RowFormat("fp8", 160, 4, LEAST_ROW_SCALE)
KEY = RowFormat("fp8", 160, 0, LEAST_KEY_SCALE)
FLOAT32_MAX = float(np.finfo(np.float32).max)
# The largest value that every format holds.
LARGEST = math.ldexp(240, 120)
E4M3 = ml_dtypes.float8_e4m3fn


@functools.cache
def compiled(row_format: RowFormat) -> tuple[Callable, Callable]:
    """Returns pack and unpack of a format, which XLA then fuses as it does in a step."""
    return jax.jit(row_format.pack), jax.jit(row_format.unpack)


def pack(row_format: RowFormat, values: np.ndarray) -> np.ndarray:
    latent, rope = np.split(values, [row_format.latent_dim], axis=-1)
    return np.asarray(compiled(row_format)[0](jnp.asarray(latent), jnp.asarray(rope)))


def unpack(row_format: RowFormat, rows: np.ndarray) -> np.ndarray:
    return np.asarray(compiled(row_format)[1](jnp.asarray(rows)))


def exact_scale(amax: float, of_key: bool) -> float:
    """Returns the scale of a group, with no operation that rounds."""
    least = next(
        exponent
        for exponent in range(-40, 0)
        # Rows: scale >= 1e-4. Keys: scale * 448 >= 1e-4.
        if math.ldexp(448 if of_key else 1, exponent) >= 1e-4
    )
    fits = (exponent for exponent in range(-170, 130) if math.ldexp(448, exponent) >= amax)
    return math.ldexp(1, max(next(fits), least))


def exact_bytes(row_format: RowFormat, values: np.ndarray, of_key: bool) -> bytes:
    """Returns the bytes of one fp8 row, by NumPy."""
    latent, rope = np.split(values, [row_format.latent_dim])
    groups = np.split(latent, range(128, latent.size, 128))
    scales = [exact_scale(float(np.max(np.abs(group))), of_key) for group in groups]
    scaled = [group / np.float32(scale) for group, scale in zip(groups, scales, strict=True)]
    return (
        np.concatenate(scaled).astype(E4M3).tobytes()
        + np.asarray(scales, "<f4").tobytes()
        + rope.astype(ml_dtypes.bfloat16).tobytes()
    )


def powers_of_two() -> st.SearchStrategy[float]:
    return st.integers(-149, 127).map(lambda exponent: math.ldexp(1, exponent))


def group_limits() -> st.SearchStrategy[float]:
    """Yields 448 * 2**k and its neighbours, between which the scale changes."""

    def limit(exponent: int, step: int) -> float:
        exact = np.float32(math.ldexp(448, exponent))
        return float(np.nextafter(exact, np.float32(step * np.inf)) if step else exact)

    return st.builds(limit, st.integers(-140, 118), st.sampled_from([-1, 0, 1]))


VALUES = st.one_of(
    st.just(0.0),
    st.floats(-LARGEST, LARGEST, width=32),
    st.floats(-8, 8, width=32),
    powers_of_two(),
    group_limits(),
).flatmap(lambda value: st.sampled_from([value, -value]))


@st.composite
def fp8_rows(draw: st.DrawFn, row_format: RowFormat) -> np.ndarray:
    """Yields a few drawn values, spread over a row of others that are smaller or zero."""
    width = row_format.latent_dim + row_format.rope_dim
    seed, magnitude = draw(st.integers(0, 99)), draw(st.sampled_from([0.0, 1e-30, 1e-4, 1.0]))
    values = np.random.default_rng(seed).normal(size=width).astype(np.float32)
    values *= np.float32(magnitude)
    for place in draw(st.lists(st.integers(0, width - 1), max_size=6)):
        values[place] = draw(VALUES)
    return values


@pytest.mark.parametrize(
    ("kind", "row_bytes", "key_bytes"),
    [("fp8", 656, 132), ("bfloat16", 1152, 256), ("float32", 2304, 512)],
)
def test_sizes_of_glm_5_3(kind: RowKind, row_bytes: int, key_bytes: int) -> None:
    """A stored row that is wider or narrower than the format says."""
    for sizes, expected in ((GLM_ROW, row_bytes), (GLM_KEY, key_bytes)):
        row_format = RowFormat(kind, *sizes)
        stored = pack(row_format, np.zeros((3, sizes[0] + sizes[1]), np.float32))
        assert row_format.row_bytes == stored[0].nbytes == expected
        assert stored.dtype == row_format.dtype
        assert stored.shape == (3, row_format.width)


@pytest.mark.parametrize("sizes", [(30, 8), (34, 0), (32, 7), (33, 4)])
def test_odd_widths_are_refused(sizes: tuple[int, int]) -> None:
    """An fp8 row that does not fill whole words, packed wrongly or failing deep inside jit."""
    with pytest.raises(ValueError, match="kv_cache_dtype"):
        RowFormat("fp8", *sizes, LEAST_ROW_SCALE)
    assert RowFormat("bfloat16", *sizes, LEAST_ROW_SCALE).width == sum(sizes)


@given(fp8_rows(ROW), fp8_rows(KEY))
def test_fp8_bytes(row: np.ndarray, key: np.ndarray) -> None:
    """A byte of a row or a key that differs from e4m3 | scales | rope, computed exactly."""
    with np.errstate(over="ignore", under="ignore"):
        assert pack(ROW, row).tobytes() == exact_bytes(ROW, row, of_key=False)
        assert pack(KEY, key).tobytes() == exact_bytes(KEY, key, of_key=True)


@pytest.mark.parametrize(("sizes", "of_key"), [(GLM_ROW, False), (GLM_KEY, True)])
def test_fp8_bytes_at_full_size(sizes: tuple[int, int, float], of_key: bool) -> None:
    """A layout that is right only for small rows, or only for a row alone."""
    row_format = RowFormat("fp8", *sizes)
    rng = np.random.default_rng(0)
    values = rng.normal(size=(6, sizes[0] + sizes[1])) * np.exp(rng.normal(size=(6, 1)) * 8)
    values = values.astype(np.float32)
    stored = pack(row_format, values.reshape(2, 3, -1)).reshape(6, -1)
    for row, value in zip(stored, values, strict=True):
        assert row.tobytes() == exact_bytes(row_format, value, of_key)


def test_scale_of_every_limit() -> None:
    """A scale that is off by two where amax is 448 * 2**k or next to it, at any k."""
    exponents = np.arange(-149 - 8, 120)
    limits = np.ldexp(np.float64(448), exponents).astype(np.float32)
    amax = np.concatenate([np.nextafter(limits, np.float32(s)) for s in (0, 1e38)] + [limits])
    amax = np.append(amax, np.asarray([0.0, FLOAT32_MAX], np.float32))
    for least, of_key in ((LEAST_ROW_SCALE, False), (LEAST_KEY_SCALE, True)):
        scales = np.asarray(power_of_two_scale(jnp.asarray(-amax[:, None]), least))
        assert scales[:, 0].tolist() == [exact_scale(float(value), of_key) for value in amax]
    assert power_of_two_scale(jnp.zeros((1, 4)), 2.0**-9).tolist() == [[2.0**-9]]


def test_e4m3_rounds_to_nearest_even() -> None:
    """A conversion that rounds twice, by way of a float of 16 bits, or not to even."""
    codes = np.arange(256, dtype=np.uint8).view(E4M3).astype(np.float32)
    codes = np.unique(codes[np.isfinite(codes)])
    ties = (codes[1:] + codes[:-1]) / 2  # exact in float32
    near = [ties, codes, np.linspace(-448, 448, 1001, dtype=np.float32)]
    # Just off a tie, closer than float16 or bfloat16 can tell.
    near += [ties * np.float32(1 + s * 2.0**-e) for s, e in itertools.product((-1, 1), (9, 12, 16))]
    for direction in (-np.inf, np.inf):
        beside = ties
        for _ in range(3):
            beside = np.nextafter(beside, np.float32(direction))
            near.append(beside)
    values = np.concatenate(near)
    values = np.resize(values[np.abs(values) <= 448], (-(-values.size // 159), 159))
    expected = values.astype(E4M3)
    plain = np.asarray(jax.jit(lambda x: x.astype(jnp.float8_e4m3fn))(values))
    assert plain.tobytes() == expected.tobytes()
    # The same inside a row. Its first value makes the scale of the first group 2**k.
    wide = RowFormat("fp8", 128, 0, LEAST_KEY_SCALE)
    for exponent in (-20, 0, 5, 100):
        scale = np.float32(math.ldexp(1, exponent))
        row = np.pad(values[:, :127] * scale, ((0, 0), (1, 0)), constant_values=448 * scale)
        stored = pack(wide, row).view(np.uint8)[:, 1:128]
        assert stored.tobytes() == expected[:, :127].tobytes()


@given(fp8_rows(ROW), fp8_rows(KEY))
def test_fp8_round_trip(row: np.ndarray, key: np.ndarray) -> None:
    """A stored value further from the given one than half a step of e4m3, or of bfloat16."""
    for row_format, values, of_key in ((ROW, row, False), (KEY, key, True)):
        back = unpack(row_format, pack(row_format, values))
        assert not np.isnan(back).any()
        exact, found = values.astype(np.float64), back.astype(np.float64)
        for start, stop in ((0, 128), (128, 160)):
            scale = exact_scale(float(np.max(np.abs(values[start:stop]))), of_key)
            bound = np.maximum(np.abs(exact[start:stop]) * 2.0**-4, scale * 2.0**-10)
            assert (np.abs(found[start:stop] - exact[start:stop]) <= bound).all()
        with np.errstate(over="ignore"):
            assert (back[160:] == values[160:].astype(ml_dtypes.bfloat16)).all()


@given(fp8_rows(ROW), fp8_rows(KEY))
def test_fp8_repacks_to_itself(row: np.ndarray, key: np.ndarray) -> None:
    """A value that drifts when stored rows are unpacked and packed again."""
    for row_format, values in ((ROW, row), (KEY, key)):
        stored = pack(row_format, values)
        # A group whose largest value rounded down to 448 times half its scale takes that scale:
        # other bytes, the same values. From then on the bytes stay too.
        again = pack(row_format, unpack(row_format, stored))
        assert unpack(row_format, again).tobytes() == unpack(row_format, stored).tobytes()
        assert pack(row_format, unpack(row_format, again)).tobytes() == again.tobytes()


@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
@given(data=st.data())
def test_plain_formats(kind: RowKind, data: st.DataObject) -> None:
    """A plain row that is not its values, rounded once, in order."""
    row_format = RowFormat(kind, 160, 4, LEAST_ROW_SCALE)
    values = data.draw(fp8_rows(row_format))
    with np.errstate(over="ignore"):
        expected = values.astype(row_format.dtype)
    stored = pack(row_format, values)
    assert stored.tobytes() == expected.tobytes()
    back = unpack(row_format, stored)
    assert back.tobytes() == expected.astype(np.float32).tobytes()
    assert pack(row_format, back).tobytes() == stored.tobytes()


@pytest.mark.parametrize("kind", ROW_KINDS)
def test_largest_values(kind: RowKind) -> None:
    """NaN from a finite value, or an overflow where the format has room."""
    row_format = RowFormat(kind, 160, 4, LEAST_ROW_SCALE)
    values = np.full((4, 164), LARGEST, np.float32)
    values[2:] = FLOAT32_MAX
    values[1::2] *= -1
    values[:, 3] = 0
    back = unpack(row_format, pack(row_format, values))
    assert (back[:, 3] == 0).all()
    assert np.isfinite(back[:2]).all()
    # The largest float32 rounds up to what no float32 holds, in e4m3 as in bfloat16.
    limit = FLOAT32_MAX if kind == "float32" else np.inf
    assert (back[2:, 4:] == [[limit], [-limit]]).all()


def test_infinities_stay_in_their_place() -> None:
    """A value that is not finite and hides as a finite one, or spoils other groups."""
    values = np.ones((3, 164), np.float32)
    values[:, 5] = [np.inf, -np.inf, np.nan]
    back = unpack(ROW, pack(ROW, values))
    assert np.isnan(back[:, 5]).all()
    assert (back[:, 128:] == 1).all()


def test_bfloat16_inputs() -> None:
    """bfloat16 activations stored otherwise than the float32 values they are."""
    values = np.random.default_rng(1).normal(size=(4, 164)).astype(ml_dtypes.bfloat16)
    for kind in ROW_KINDS:
        row_format = RowFormat(kind, 160, 4, LEAST_ROW_SCALE)
        widened = pack(row_format, values.astype(np.float32))
        assert pack(row_format, values).tobytes() == widened.tobytes()
