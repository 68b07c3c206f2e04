"""Tiles of token rows that go through the same expert, made by counting.

A block for each expert lists the expert's pairs, and finds where its tiles begin from the pairs of
the experts before it alone: no block waits for another.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Int

from pallas_kernels.common import block_selection
from pallas_kernels.common.pytree import pytree_dataclass
from pallas_kernels.common.types import Interpret, Ref, Scalar

_HEADER = 4  # numbers of a header: an asynchronous copy moves 16 bytes
_FEW_PAIRS = 256  # so few that experts without a pair are many, and can be counted


@pytree_dataclass
class Tiles:
    """Pairs of a token and an expert, in tiles of one expert each, by token.

    The pair of a token and its choice of a rank has the number `token * per_token + rank`. Those
    with the shared expert, one a token, follow; it has the number of experts for a number.

    Attributes:
        used: the first number is how many tiles there are; what follows them means nothing.
        header: of each tile its expert, its number of pairs, perhaps 0, and zeros.
        pairs: pairs of each tile, then what means nothing.
    """

    used: Int[Array, " header"]
    header: Int[Array, "tiles header"]
    pairs: Int[Array, "tiles tile_rows"]


@dataclasses.dataclass(frozen=True)
class TilePlan:
    """Sizes of the tiles of a step.

    Attributes:
        num_tokens: token rows, padding included.
        per_token: routed experts of a token.
        num_experts: routed experts.
        tile_rows: rows of a tile.
        interpreted: whether the kernel runs in the interpreter.
    """

    num_tokens: int
    per_token: int
    num_experts: int
    tile_rows: int
    interpreted: bool

    @property
    def num_pairs(self) -> int:
        """Pairs with routed experts."""
        return self.num_tokens * self.per_token

    @property
    def skips_idle(self) -> bool:
        """Whether experts without a pair have no tile, instead of an empty one."""
        return self.num_pairs <= _FEW_PAIRS

    @property
    def shared_tiles(self) -> int:
        """Tiles of the shared expert, which come first."""
        return -(-self.num_tokens // self.tile_rows)

    @property
    def most_tiles(self) -> int:
        """Most tiles: a block of the grid each."""
        experts = min(self.num_experts, self.num_pairs) if self.skips_idle else self.num_experts
        return self.shared_tiles + experts + self.num_pairs // self.tile_rows

    @property
    def chunk(self) -> int:
        """Pairs that are listed together."""
        granule = block_selection.GRANULE
        return min(block_selection.LARGEST_BLOCK, -(-self.num_pairs // granule) * granule)

    @property
    def chunk_tokens(self) -> int:
        """Most pairs of an expert among them, as no token chooses it twice."""
        lanes = 128
        return -(-self.chunk // self.per_token // lanes) * lanes


def make_tiles(
    experts: Int[Array, "tokens k"], num_experts: int, tile_rows: int, *, interpret: Interpret
) -> Tiles:
    """Tiles of the pairs of tokens and experts, and of all tokens with the shared expert.

    Args:
        experts: routed experts of each token, distinct; `num_experts` stands for none.
        num_experts: number of routed experts.
        tile_rows: rows of a tile.
        interpret: for `plgpu.kernel`.
    """
    num_tokens, per_token = experts.shape
    plan = TilePlan(num_tokens, per_token, num_experts, tile_rows, interpret is not None)
    room = (pl.cdiv(plan.num_tokens, plan.chunk_tokens) + 1) * plan.chunk_tokens
    used, header, pairs = plgpu.kernel(
        functools.partial(_block, plan),
        out_type=[
            jax.ShapeDtypeStruct(shape, jnp.int32)
            for shape in (
                (_HEADER,),
                (plan.most_tiles, _HEADER),
                (plan.most_tiles, tile_rows),
            )
        ],
        grid=(num_experts + plan.shared_tiles,),
        grid_names=("block",),
        scratch_types=[
            plgpu.SMEM((block_selection.buffer_size(plan.chunk),), jnp.int32),
            plgpu.SMEM((room,), jnp.int32),
            plgpu.SMEM((128,), jnp.int32),
            plgpu.Barrier(),
        ],
        kernel_name="experts_tiles",
        interpret=interpret,
    )(experts.reshape(-1))
    return Tiles(used, header, pairs)


def _block(
    plan: TilePlan,
    experts_ref: Ref,
    used_ref: Ref,
    header_ref: Ref,
    pairs_ref: Ref,
    buffer: Ref,
    listed: Ref,
    line: Ref,
    loaded: Ref,
) -> None:
    """Body of a block: the tiles of a routed expert, or one of the shared one's."""
    block = lax.axis_index("block")

    def write(tile: Scalar, expert: Scalar, count: Scalar, first: Scalar) -> None:
        """Writes a tile's header, and its pairs from `listed[first]` on."""
        _fill(line, expert, count)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(line.at[pl.ds(0, _HEADER)], header_ref.at[tile])
        plgpu.copy_smem_to_gmem(listed.at[pl.ds(first, plan.tile_rows)], pairs_ref.at[tile])
        plgpu.wait_smem_to_gmem(0)

    @pl.when(block < plan.num_experts)
    def _() -> None:
        begin, end, count = _list_pairs(plan, block, experts_ref, buffer, listed, loaded)

        @pl.loop(begin, end)
        def _(tile: jax.Array) -> None:
            first = (tile - begin) * plan.tile_rows
            write(tile, block, jnp.clip(count - first, 0, plan.tile_rows), first)

        @pl.when(block == plan.num_experts - 1)
        def _() -> None:
            _fill(line, end, 0)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(line.at[pl.ds(0, _HEADER)], used_ref)
            plgpu.wait_smem_to_gmem(0)

    @pl.when(block >= plan.num_experts)
    def _() -> None:
        tile = block - plan.num_experts
        first = tile * plan.tile_rows
        size = listed.shape[0]
        listed[...] = plan.num_pairs + first + block_selection.indices(size)
        count = jnp.minimum(plan.num_tokens - first, plan.tile_rows)
        write(tile, plan.num_experts, count, 0)


def _fill(line: Ref, first: Scalar, second: Scalar) -> None:
    """Writes two numbers, then zeros."""
    (size,) = line.shape
    index = block_selection.indices(size)
    values = jnp.where(index == 1, jnp.broadcast_to(jnp.int32(second), index.shape), 0)
    line[...] = jnp.where(index == 0, jnp.broadcast_to(jnp.int32(first), index.shape), values)


def _list_pairs(
    plan: TilePlan, expert: jax.Array, experts_ref: Ref, buffer: Ref, listed: Ref, loaded: Ref
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Lists the pairs of a routed expert, ascending.

    Returns:
        Its first tile, the next expert's, and the number of pairs.
    """
    size, alone = plan.chunk, plan.num_pairs <= plan.chunk
    index = block_selection.indices(size)
    before = expert
    if alone:
        part = buffer.at[pl.ds(0, plan.num_pairs)]
        plgpu.copy_gmem_to_smem(
            experts_ref, part, loaded, oob_mode=plgpu.OOBFillMode.PROMISE_IN_BOUNDS
        )
        plgpu.barrier_wait(loaded)
    if plan.skips_idle:
        before = _count_chosen(plan, expert, buffer)

    def visit(chunk: Scalar, state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        lower, found = state
        begin = chunk * size
        # The last chunk begins early enough to be full, and leaves out what the one before has.
        start = 0 if alone else jnp.minimum(begin, plan.num_pairs - size)
        chosen = block_selection.load(buffer if alone else experts_ref, start, size)
        valid = (index >= begin - start) & (index < plan.num_pairs - start)
        own = valid & (chosen == expert)

        @pl.when(block_selection.count(own) > 0)
        def _() -> None:
            block_selection.compact(own, buffer, interpreted=plan.interpreted)
            pairs = start + block_selection.load(buffer, 0, plan.chunk_tokens)
            listed[pl.ds(found, plan.chunk_tokens)] = pairs

        lower = lower + block_selection.count(valid & (chosen < expert))
        return lower, found + block_selection.count(own)

    chunks = pl.cdiv(plan.num_pairs, size)
    lower, count = lax.fori_loop(0, chunks, visit, (jnp.int32(0), jnp.int32(0)))
    first = plan.shared_tiles + lax.div(lower, plan.tile_rows) + before
    has_tile = jnp.where(count > 0, 1, 0) if plan.skips_idle else 1
    end = plan.shared_tiles + lax.div(lower + count, plan.tile_rows) + before + has_tile
    return first, end, count


def _count_chosen(plan: TilePlan, expert: jax.Array, chosen: Ref) -> jax.Array:
    """Number of lower experts that any token chose."""
    lanes = 128
    number = block_selection.indices(pl.cdiv(plan.num_experts, lanes) * lanes)

    def mark(pair: jax.Array, marks: jax.Array) -> jax.Array:
        return jnp.where(number == chosen[pair], 1, marks)

    nothing = block_selection.filled(number.shape[0], 0)
    marks = lax.fori_loop(0, plan.num_pairs, mark, nothing)
    return block_selection.count((marks == 1) & (number < expert))
