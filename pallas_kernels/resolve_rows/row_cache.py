"""State of the row cache, and the selections that are resolved against it."""

from jaxtyping import Array, Float, Int

from pallas_kernels.common.pytree import pytree_dataclass


@pytree_dataclass
class RowCache:
    """Rows of host pages that the sequence slots keep on this device.

    A slot has as many entries for each index group, which lie in the group's own layers of the
    slot's leased pages, so one lease serves all groups.

    Attributes:
        page: int32 [slots, row_cache_pages], leased device pages, -1 where a slot has no lease.
        row: int32 [slots, groups, entries], the row of its sequence on this device that each entry
            holds, -1 for none.
        mean: float32 likewise, running mean of its index scores, each step counting as much as all
            before it; NaN before the first.
        entry: int16 [slots, context], by row of the sequence the entry that may hold it; it counts
            only where `row` agrees, so it is never cleared, and serves one group after another.
    """

    page: Int[Array, "slots row_cache_pages"]
    row: Int[Array, "slots groups entries"]
    mean: Float[Array, "slots groups entries"]
    entry: Int[Array, "slots context"]


@pytree_dataclass
class SelectedRows:
    """Rows that the sequences of a step selected in one index group.

    Attributes:
        slots: int32 [sequences], slot of each sequence, -1 for padding; no slot twice.
        rows: int32 [sequences, rows, k], rows of the sequence on this device, each at most once a
            query row; those of entries that lie nowhere are not read.
        row_ids: int32 [sequences, rows, k], where they lie; ids from the first host row's on are
            host rows, -1 is nowhere.
        scores: float32 [sequences, entries], this step's index score of what each entry of the row
            cache holds, the best of the query rows.
    """

    slots: Int[Array, " sequences"]
    rows: Int[Array, "sequences rows k"]
    row_ids: Int[Array, "sequences rows k"]
    scores: Float[Array, "sequences entries"]
