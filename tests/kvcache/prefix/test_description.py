import re
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from kvcache.prefix.description import PrefixDescription
from kvcache.prefix.file import PrefixFileError, PrefixReader
from pallas_kernels.common.row_format import RowFormat
from tests.kvcache.prefix.samples import (
    DESCRIPTION,
    assert_refused,
    describe,
    set_field,
    write_sample,
)


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    write_sample(tmp_path / "whole")
    return tmp_path / "whole"


@pytest.mark.parametrize(
    ("store", "named"),
    [
        (describe(model="tiny-2"), "model is 'tiny-1', the store has 'tiny-2'"),
        (describe(num_layers=5), "num_layers without MTP is 3, the store has 4"),
        (describe(num_index_layers=3), "num_index_layers without MTP is 1, the store has 2"),
        (describe(num_mtp_layers=0), "num_layers without MTP is 3, the store has 4"),
        (describe("bfloat16", "fp8"), "row_format.kind is 'fp8', the store has 'bfloat16'"),
        (describe("fp8", "float32"), "index_row_format.kind is 'fp8', the store has 'float32'"),
        (describe(row_format=RowFormat("fp8", 12, 4, 1e-4)), "row_format.latent_dim is 8"),
        (describe(row_format=RowFormat("fp8", 8, 2, 1e-4)), "row_format.rope_dim is 4"),
        (describe(row_format=RowFormat("fp8", 8, 4, 1e-3)), "row_format.least_scale is 0.0001"),
        (describe(index_row_format=RowFormat("fp8", 4, 0, 1e-6)), "index_row_format.latent_dim"),
    ],
)
def test_misfits(whole: Path, store: PrefixDescription, named: str) -> None:
    """Rows of another model or format are taken for the store's own."""
    with PrefixReader(whole) as reader:
        reader.check_fits(DESCRIPTION)
        with pytest.raises(PrefixFileError, match=re.escape(named)) as caught:
            reader.check_fits(store)
    assert str(whole) in str(caught.value)


def test_all_misfits_are_named(whole: Path) -> None:
    """One has to mend a misfit to hear of the next."""
    store = describe("float32", model="other", num_layers=9)
    with (
        PrefixReader(whole) as reader,
        pytest.raises(PrefixFileError, match=r"model.*num_layers.*kind"),
    ):
        reader.check_fits(store)


def test_mtp_layer_fits_one_way() -> None:
    """A store that needs the MTP layer's rows does without, or one without refuses the others."""
    trunk = describe(num_layers=3, num_index_layers=1, num_mtp_layers=0)
    assert DESCRIPTION.misfits(trunk) == []
    assert trunk.misfits(DESCRIPTION) == [
        "num_mtp_layers is 0, the store needs rows of the MTP layer"
    ]


@pytest.mark.parametrize(
    ("field", "value", "match"),
    [
        ("format_version", 2, "format_version is 2, only 1 is known"),
        ("format_version", "1", "format_version is '1'"),
        ("format_version", True, "format_version must be of type int"),
        ("num_tokens", 8, "tokens.npy is no int32"),
        ("num_tokens", 6, "tokens.npy is no int32"),
        ("num_tokens", 10**15, "4000000000000000 bytes in tokens.npy, more than"),
        ("num_tokens", 10**300, "bytes in tokens.npy, more than"),
        ("num_tokens", -7, "block_tokens must be 1 to -7, got 3"),
        ("num_tokens", 7.0, "num_tokens must be of type int"),
        ("block_tokens", 0, "block_tokens must be 1 to 7, got 0"),
        ("block_tokens", 8, "block_tokens must be 1 to 7, got 8"),
        ("block_tokens", 4, "rows/00000000.npy is no int32"),
        ("block_tokens", 1, "rows/00000000.npy is no int32"),
        ("model", "", "model must have 1 to 1024 characters"),
        ("model", "x" * 1025, "model must have 1 to 1024 characters"),
        ("model", None, "model must be of type str"),
        ("num_layers", 5, "rows/00000000.npy is no int32"),
        ("num_layers", 1, "num_layers must exceed num_mtp_layers 1"),
        ("num_layers", 10**12, "rows/00000000.npy, more than"),
        ("num_layers", 10**5, "rows/00000000.npy has"),
        ("num_index_layers", 3, "keys/00000000.npy is no int32"),
        ("num_mtp_layers", 2, "num_mtp_layers must be 0 or 1"),
        ("num_mtp_layers", True, "num_mtp_layers must be of type int"),
        ("row_format", "fp8", "row_format must be of type dict"),
        ("row_format", {}, "row_format must have the fields"),
        ("row_format.kind", "bfloat16", "rows/00000000.npy is no bfloat16"),
        ("row_format.kind", "float32", "rows/00000000.npy is no float32|has"),
        ("row_format.kind", "int4", "row_format.kind must be one of"),
        ("row_format.kind", [], "kind must be of type str"),
        ("row_format.latent_dim", 12, "rows/00000000.npy is no int32"),
        ("row_format.latent_dim", 6, "divisible by 4"),
        ("row_format.latent_dim", 0, "latent_dim >= 1"),
        ("row_format.rope_dim", -4, "rope_dim >= 0"),
        ("row_format.least_scale", "small", "least_scale must be of type float"),
        ("index_row_format.latent_dim", 4, "keys/00000000.npy is no int32"),
        ("more", 1, "prefix.json must have the fields .*'more'"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_lies(whole: Path, field: str, value: Any, match: str) -> None:
    """A description is believed without a look at the bytes: wrong rows, or a vast allocation."""
    set_field(whole, field, value)
    tracemalloc.start()
    try:
        assert_refused(whole, match)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"model": ""}, "model must have 1 to 1024 characters, got 0"),
        ({"num_layers": 1}, "num_layers must exceed num_mtp_layers 1, got 1"),
        ({"num_index_layers": 0, "num_mtp_layers": 0}, "num_index_layers must exceed"),
        ({"num_mtp_layers": -1}, "num_mtp_layers must be 0 or 1, got -1"),
        ({"row_format": RowFormat("float32", 0, 4, 1e-4)}, "row_format must have latent_dim"),
        ({"index_row_format": RowFormat("float32", 4, -2, 1e-4)}, "index_row_format must have"),
    ],
)
def test_refused_descriptions(changes: dict[str, Any], match: str) -> None:
    """A description that no store can have comes to light when a file is read."""
    with pytest.raises(ValueError, match=match):
        describe(**changes)
