"""Every size of the store, and where a position lies."""

import dataclasses
from typing import TypeVar

from jaxtyping import Array, Int

from pallas_kernels.index_scores import KEY_BLOCK
from pallas_kernels.row_format import RowFormat

Position = TypeVar("Position", int, Int[Array, "..."])


@dataclasses.dataclass(frozen=True, kw_only=True)
class KVGeometry:
    """Sizes of the store. A page holds `rows_per_device` rows on each device of the mesh.

    Position p lives on device p mod num_devices; block tables, pools and reference counts see
    page ids only and know nothing of the mesh.

    Attributes:
        num_layers: layers with MLA rows.
        num_index_layers: layers with index keys.
        num_pages: page ids, each with room for its index keys on the device.
        device_pages: pages whose MLA rows fit on the device.
        num_devices: devices that share each page.
        rows_per_device: rows of a page on one device.
        max_sequences: sequence slots.
        max_pages_per_sequence: length of a block table.
        row_format: format of an MLA row.
        index_row_format: format of an index key.

    Raises:
        ValueError: a size is not positive, or pages do not divide a block of keys.
    """

    num_layers: int
    num_index_layers: int
    num_pages: int
    device_pages: int
    num_devices: int
    max_sequences: int
    max_pages_per_sequence: int
    row_format: RowFormat
    index_row_format: RowFormat
    rows_per_device: int = 64

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, int) and value < 1:
                raise ValueError(f"{field.name} must be positive, got {value}")
        if KEY_BLOCK % self.rows_per_device:
            raise ValueError(f"rows_per_device {self.rows_per_device} must divide {KEY_BLOCK}")
        if self.device_pages > self.num_pages:
            raise ValueError(f"device_pages {self.device_pages} exceeds num_pages {self.num_pages}")

    @property
    def rows_per_page(self) -> int:
        """Tokens of a page."""
        return self.rows_per_device * self.num_devices

    @property
    def device_rows(self) -> int:
        """MLA rows of a layer on one device. Physical ids from here on name host rows."""
        return self.device_pages * self.rows_per_device

    @property
    def page_bytes(self) -> int:
        """Bytes of a page's MLA rows, all layers and devices."""
        return self.num_layers * self.rows_per_page * self.row_format.row_bytes

    @property
    def index_page_bytes(self) -> int:
        """Bytes of a page's index keys, all layers and devices."""
        return self.num_index_layers * self.rows_per_page * self.index_row_format.row_bytes

    @property
    def token_bytes(self) -> int:
        """Bytes of one token, all layers: MLA rows and index keys."""
        return (self.page_bytes + self.index_page_bytes) // self.rows_per_page

    def pages_for(self, num_tokens: int) -> int:
        """Pages that hold `num_tokens` tokens."""
        return -(-num_tokens // self.rows_per_page)

    def local_row(self, position: Position) -> Position:
        """Row of a position within its page, on the device that owns it."""
        return (position % self.rows_per_page) // self.num_devices

    def page_row(self, position: Position) -> Position:
        """Index of a position along its page's global rows axis."""
        return (position % self.num_devices) * self.rows_per_device + self.local_row(position)
