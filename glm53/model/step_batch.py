"""Token rows of a step."""

import jax.numpy as jnp
from jaxtyping import Array, Int

from pallas_kernels.common.pytree import pytree_dataclass
from pallas_kernels.experts import StepKind

MOST_DECODE_ROWS = 8
"""Most rows of a sequence in a decode step: the last sampled token, and drafts."""


@pytree_dataclass
class StepBatch:
    """The token rows of a step, as many for each of its sequences.

    Attributes:
        positions: int32 [sequences, rows], position of each row in its sequence's pages, ascending
            within a sequence; -1 is padding, which reads and writes nothing.
        slots: int32 [sequences], slot of each sequence; -1 is padding.
        block_tables: int32 [sequences, context_pages], the first pages of each sequence.
    """

    positions: Int[Array, "sequences rows"]
    slots: Int[Array, " sequences"]
    block_tables: Int[Array, "sequences context_pages"]

    @property
    def kind(self) -> StepKind:
        """Kind of step, by the rows of a sequence: never by how many sequences there are."""
        return "decode" if self.positions.shape[1] <= MOST_DECODE_ROWS else "prefill"

    @property
    def flat_positions(self) -> Int[Array, " tokens"]:
        """Positions of all rows."""
        return self.positions.reshape(-1)

    @property
    def flat_tables(self) -> Int[Array, "tokens context_pages"]:
        """The block table of each row."""
        return jnp.repeat(self.block_tables, self.positions.shape[1], axis=0)
