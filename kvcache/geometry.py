"""Sizes of the store in rows, pages and bytes, and where each position lies in it."""

import dataclasses
from typing import TypeVar

from jaxtyping import Array, Int

from kvcache.reads import NUM_READS
from pallas_kernels.common.row_format import RowFormat
from pallas_kernels.index_scores import KEY_BLOCK

Position = TypeVar("Position", int, Int[Array, "..."])

MAX_ROW_CACHE_ROWS = (1 << 15) - 1
_MAY_BE_ZERO = ("host_pages", "row_cache_rows", "staging_pages")


@dataclasses.dataclass(frozen=True, kw_only=True)
class KVGeometry:
    """Sizes of the store. A page holds `rows_per_device` rows on each device of the mesh.

    Position p lives on device p mod num_devices; block tables, pools and reference counts see
    page ids only and know nothing of the mesh.

    Attributes:
        group_layers: layers of each index group: a layer with index keys, and those after it that
            share its selection.
        device_pages: pages whose MLA rows fit on the device.
        host_pages: pages whose MLA rows fit in host memory; 0 keeps every page on the device.
        num_devices: devices that share each page.
        rows_per_device: rows of a page on one device.
        max_sequences: sequence slots.
        max_pages_per_sequence: length of a block table.
        row_cache_rows: rows that a sequence may keep on each device of pages that are not there; 0
            where steps read no such pages, as all pages of the sequences that run are on the
            device.
        staging_pages: device pages that a prefill may stage pages on that are not there.
        row_format: format of an MLA row.
        index_row_format: format of an index key.

    Raises:
        ValueError: a size is refused, or pages do not divide a block of keys.
    """

    group_layers: tuple[int, ...]
    device_pages: int
    num_devices: int
    max_sequences: int
    max_pages_per_sequence: int
    row_format: RowFormat
    index_row_format: RowFormat
    rows_per_device: int = 64
    host_pages: int = 0
    row_cache_rows: int = 0
    staging_pages: int = 0

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            least = 0 if field.name in _MAY_BE_ZERO else 1
            if isinstance(value, int) and value < least:
                kind = "positive" if least else "0 or more"
                raise ValueError(f"{field.name} must be {kind}, got {value}")
        if not self.group_layers or min(self.group_layers) < 1:
            raise ValueError(f"group_layers must be positive, got {self.group_layers}")
        if KEY_BLOCK % self.rows_per_device:
            raise ValueError(f"rows_per_device {self.rows_per_device} must divide {KEY_BLOCK}")
        if self.row_cache_rows and not self.has_host_tier:
            raise ValueError(
                f"row_cache_rows {self.row_cache_rows} needs host_pages, which is {self.host_pages}"
            )
        last_row = self.slab_rows + self.host_pages * self.rows_per_device
        if last_row >= 1 << 31:
            most = ((1 << 31) - 1) // (self.num_layers * self.rows_per_device)
            beside, lower = "", f"set device_pages to at most {most}"
            if self.host_pages:
                beside = f" and {self.host_pages} pages in host memory"
                lower = "lower host_memory_gib or device_pages"
            raise ValueError(
                f"device_pages {self.device_pages}{beside} have {last_row} rows, more than 32-bit "
                f"row ids can address: {lower}"
            )
        if self.row_cache_rows > MAX_ROW_CACHE_ROWS:
            raise ValueError(
                f"row_cache_rows must be at most {MAX_ROW_CACHE_ROWS}, got {self.row_cache_rows}"
            )

    @property
    def has_host_tier(self) -> bool:
        """Whether pages may leave the device."""
        return self.host_pages > 0

    @property
    def reads_host(self) -> bool:
        """Whether steps read pages that are not on the device."""
        return self.row_cache_rows > 0

    @property
    def num_layers(self) -> int:
        """Layers with MLA rows."""
        return sum(self.group_layers)

    @property
    def num_index_layers(self) -> int:
        """Layers with index keys, one an index group."""
        return len(self.group_layers)

    @property
    def num_pages(self) -> int:
        """Page ids, each with room for its index keys on the device."""
        return self.device_pages + self.host_pages

    @property
    def rows_per_page(self) -> int:
        """Tokens of a page."""
        return self.rows_per_device * self.num_devices

    @property
    def device_rows(self) -> int:
        """MLA rows of a layer on one device."""
        return self.device_pages * self.rows_per_device

    @property
    def slab_rows(self) -> int:
        """MLA rows of all layers on one device. Physical ids from here on name host rows."""
        return self.num_layers * self.device_rows

    @property
    def sequence_rows(self) -> int:
        """Rows of the longest sequence on one device."""
        return self.max_pages_per_sequence * self.rows_per_device

    @property
    def row_cache_pages(self) -> int:
        """Device pages that a sequence's row-cache rows take."""
        return -(-self.row_cache_rows // self.rows_per_device)

    @property
    def page_bytes(self) -> int:
        """Bytes of a page's MLA rows, all layers and devices, in either tier."""
        return self.num_layers * self.rows_per_page * self.row_format.row_bytes

    @property
    def index_page_bytes(self) -> int:
        """Bytes of a page's index keys, all layers and devices; always on the device."""
        return self.num_index_layers * self.rows_per_page * self.index_row_format.row_bytes

    @property
    def token_bytes(self) -> int:
        """Bytes of one token, all layers: MLA rows and index keys."""
        return (self.page_bytes + self.index_page_bytes) // self.rows_per_page

    @property
    def row_cache_row_bytes(self) -> int:
        """Bytes of one row-cache row, all layers: every index group has a row there of its own."""
        return self.num_layers * self.row_format.row_bytes

    @property
    def bookkeeping_bytes(self) -> int:
        """Bytes on all devices that hold no row: page maps, selection counts and row-cache maps."""
        if not self.has_host_tier:
            return self.num_devices * 8 * self.num_pages
        entries = (
            self.num_index_layers * 8 * self.row_cache_rows
            + 2 * self.sequence_rows * self.reads_host
        )
        slots = self.max_sequences * (entries + 4 * self.row_cache_pages + 4 * NUM_READS)
        staging = 4 * max(self.staging_pages, 1)
        return self.num_devices * (slots + 12 * self.num_pages + staging)

    @property
    def device_bytes(self) -> int:
        """Bytes of the store on all devices."""
        rows = self.device_pages * self.page_bytes + self.num_pages * self.index_page_bytes
        return rows + self.bookkeeping_bytes

    @property
    def host_bytes(self) -> int:
        """Bytes of the store in host memory."""
        return self.host_pages * self.page_bytes

    def pages_within(
        self, device_bytes: int, host_bytes: int, min_device_pages: int = 1
    ) -> tuple[int, int]:
        """Most device and host pages whose bytes fit, index keys of both on the devices.

        Args:
            device_bytes: bytes on all devices together, for rows and index keys.
            host_bytes: bytes in host memory.
            min_device_pages: device pages that host pages leave room for.

        Returns:
            Device pages and host pages. Host pages come first: without index keys on the device
            they are of no use.
        """
        host_pages = host_bytes // self.page_bytes
        device_page_bytes = self.page_bytes + self.index_page_bytes
        spare = device_bytes - min_device_pages * device_page_bytes
        host_pages = max(0, min(host_pages, spare // self.index_page_bytes))
        left = device_bytes - host_pages * self.index_page_bytes
        return left // device_page_bytes, host_pages

    def pages_for(self, num_tokens: int) -> int:
        """Pages that hold `num_tokens` tokens."""
        return -(-num_tokens // self.rows_per_page)

    def local_row(self, position: Position) -> Position:
        """Row of a position within its page, on the device that owns it."""
        return (position % self.rows_per_page) // self.num_devices

    def page_row(self, position: Position) -> Position:
        """Index of a position along its page's global rows axis."""
        return (position % self.num_devices) * self.rows_per_device + self.local_row(position)
