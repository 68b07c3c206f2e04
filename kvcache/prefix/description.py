"""Description of the rows of a prefix file, and its form as JSON."""

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from pallas_kernels.common.row_format import ROW_KINDS, RowFormat

FORMAT_VERSION = 1

_LONGEST_MODEL = 1024
_JSON_TYPES: Mapping[str, type] = {
    "format_version": int,
    "num_tokens": int,
    "block_tokens": int,
    "model": str,
    "num_layers": int,
    "num_index_layers": int,
    "num_mtp_layers": int,
    "row_format": dict,
    "index_row_format": dict,
}
_ROW_FORMAT_TYPES: Mapping[str, type] = {
    "kind": str,
    "latent_dim": int,
    "rope_dim": int,
    "least_scale": float,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrefixDescription:
    """Description of cached rows, of a file as of a store.

    Attributes:
        model: fingerprint of the model whose rows these are, an opaque string.
        num_layers: layers with MLA rows, the MTP layer included.
        num_index_layers: layers with index keys, the MTP layer included.
        num_mtp_layers: how many of both the MTP layer adds, 0 or 1. It is the last of both.
        row_format: format of an MLA row.
        index_row_format: format of an index key.

    Raises:
        ValueError: a size is out of range, or `model` is empty or longer than 1024 characters.
    """

    model: str
    num_layers: int
    num_index_layers: int
    num_mtp_layers: int
    row_format: RowFormat
    index_row_format: RowFormat

    def __post_init__(self) -> None:
        if not 0 < len(self.model) <= _LONGEST_MODEL:
            raise ValueError(
                f"model must have 1 to {_LONGEST_MODEL} characters, got {len(self.model)}"
            )
        if self.num_mtp_layers not in (0, 1):
            raise ValueError(f"num_mtp_layers must be 0 or 1, got {self.num_mtp_layers}")
        for name in ("num_layers", "num_index_layers"):
            if getattr(self, name) <= self.num_mtp_layers:
                raise ValueError(
                    f"{name} must exceed num_mtp_layers {self.num_mtp_layers}, "
                    f"got {getattr(self, name)}"
                )
        for name in ("row_format", "index_row_format"):
            row = getattr(self, name)
            if row.latent_dim < 1 or row.rope_dim < 0:
                raise ValueError(
                    f"{name} must have latent_dim >= 1 and rope_dim >= 0, "
                    f"got {row.latent_dim} and {row.rope_dim}"
                )

    def misfits(self, store: "PrefixDescription") -> list[str]:
        """Why a store cannot take these rows; empty if it can.

        A store without the MTP layer takes rows that have it, and leaves its part out.
        """
        found, wanted = self._comparable(), store._comparable()
        hints = {"model": " (other weights, configuration or numerics)"}
        misfits = [
            f"{name} is {found[name]!r}, the store has {wanted[name]!r}{hints.get(name, '')}"
            for name in wanted
            if found[name] != wanted[name]
        ]
        if store.num_mtp_layers > self.num_mtp_layers:
            misfits.append("num_mtp_layers is 0, the store needs rows of the MTP layer")
        return misfits

    def _comparable(self) -> dict[str, Any]:
        """Fields that must be equal, by name. Layers are counted without the MTP layer."""
        values: dict[str, Any] = {"model": self.model}
        for name in ("num_layers", "num_index_layers"):
            values[f"{name} without MTP"] = getattr(self, name) - self.num_mtp_layers
        for name in ("row_format", "index_row_format"):
            row = dataclasses.asdict(getattr(self, name))
            values |= {f"{name}.{field}": value for field, value in row.items()}
        return values


@dataclasses.dataclass(frozen=True)
class PrefixHeader:
    """Contents of `prefix.json`.

    Attributes:
        description: what the rows are.
        num_tokens: tokens of the prefix.
        block_tokens: tokens of each block but the last, which may be smaller.
    """

    description: PrefixDescription
    num_tokens: int
    block_tokens: int

    @property
    def num_blocks(self) -> int:
        """Blocks of the file."""
        return -(-self.num_tokens // self.block_tokens)

    def tokens_of(self, block: int) -> int:
        """Tokens of a block."""
        return min(self.block_tokens, self.num_tokens - block * self.block_tokens)

    def to_json(self) -> bytes:
        """The content of `prefix.json`."""
        description = dataclasses.asdict(self.description)
        for name in ("row_format", "index_row_format"):
            description[name]["least_scale"] = float(description[name]["least_scale"])
        sizes = {"num_tokens": self.num_tokens, "block_tokens": self.block_tokens}
        values = {"format_version": FORMAT_VERSION} | sizes | description
        return json.dumps(values, indent=1).encode()

    @classmethod
    def from_json(cls, text: bytes) -> "PrefixHeader":
        """Reads what `to_json` wrote.

        Raises:
            ValueError: another version, or a field is missing, unknown, of another type, or out of
                range.
        """
        try:
            values = json.loads(text)
        except RecursionError as error:
            raise ValueError("it is nested too deep") from error
        if not isinstance(values, dict) or "format_version" not in values:
            raise ValueError("it has no format_version")
        if values["format_version"] != FORMAT_VERSION:
            raise ValueError(
                f"format_version is {values['format_version']!r}, only {FORMAT_VERSION} is known"
            )
        _check_types("prefix.json", values, _JSON_TYPES)
        del values["format_version"]
        for name in ("row_format", "index_row_format"):
            values[name] = _row_format(name, values[name])
        num_tokens, block_tokens = values.pop("num_tokens"), values.pop("block_tokens")
        if not 1 <= block_tokens <= num_tokens:
            raise ValueError(f"block_tokens must be 1 to {num_tokens}, got {block_tokens}")
        return cls(PrefixDescription(**values), num_tokens, block_tokens)


def _row_format(name: str, values: dict[str, Any]) -> RowFormat:
    _check_types(name, values, _ROW_FORMAT_TYPES)
    if values["kind"] not in ROW_KINDS:
        raise ValueError(f"{name}.kind must be one of {ROW_KINDS}, got {values['kind']!r}")
    return RowFormat(**values)


def _check_types(what: str, values: dict[str, Any], types: Mapping[str, type]) -> None:
    if values.keys() != types.keys():
        raise ValueError(f"{what} must have the fields {sorted(types)}, got {sorted(values)}")
    for name, kind in types.items():
        # Not isinstance: true would pass for an int.
        if type(values[name]) is not kind:
            raise ValueError(f"{name} must be of type {kind.__name__}, got {values[name]!r}")
