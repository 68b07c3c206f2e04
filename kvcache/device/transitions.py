"""The store's transitions between steps, compiled once: page moves, leases, whole pages.

Each takes the store donated and returns it; what follows is ordered behind it by that alone.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, PartitionSpec
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, Int, Shaped

from kvcache.cache_compiled import cache_compiled
from kvcache.device.page_moves import MoveList
from kvcache.device.store import MESH_AXIS, KVStore, in_host, on_device
from kvcache.geometry import KVGeometry
from pallas_kernels.common.compiler_options import gpu_options
from pallas_kernels.move_pages import copy_pages, offload_pages, onload_pages

PageRows = Shaped[Array, "pages rows_per_page layers width"]
"""MLA rows of whole pages."""

PageKeys = Shaped[Array, "pages rows_per_page index_layers index_width"]
"""Index keys of whole pages."""

EVERYWHERE = PartitionSpec()
_BY_ROW = PartitionSpec(None, MESH_AXIS)


class Transitions:
    """Compiled transitions of one store on one mesh.

    The store is donated, but to `read`. Slots and pages of -1 are padding.

    Attributes:
        move: executes a list of page moves.
        lease: gives slots row-cache pages, -1 for none.
        set_staging_pages: sets the pages that a prefill may stage to.
        write: fills pages, wherever they lie, with rows and index keys, the rows of a page as
            `KVGeometry.page_row` has them.
        decay: halves the store's counts of selections, and returns the counts before.
        read: returns what `write` takes.
    """

    move: Callable[[KVStore, MoveList], KVStore]
    lease: Callable[
        [KVStore, Int[ArrayLike, " changes"], Int[ArrayLike, "changes row_cache_pages"]], KVStore
    ]
    set_staging_pages: Callable[[KVStore, Int[ArrayLike, " staging"]], KVStore]
    write: Callable[
        [
            KVStore,
            Int[ArrayLike, " pages"],
            Shaped[ArrayLike, "pages rows_per_page layers width"],
            Shaped[ArrayLike, "pages rows_per_page index_layers index_width"],
        ],
        KVStore,
    ]
    decay: Callable[[KVStore], tuple[KVStore, Float[Array, " pages"]]]
    read: Callable[[KVStore, Int[ArrayLike, " pages"]], tuple[PageRows, PageKeys]]

    def __init__(self, geometry: KVGeometry, mesh: Mesh) -> None:
        specs, shardings = KVStore.specs(geometry), KVStore.shardings(geometry, mesh)
        options = gpu_options(mesh)

        def jit(transition: Callable, *inputs: PartitionSpec, also: Any = None) -> Callable:
            """One that returns the store, or the store and `also` (specs)."""

            def local(store: KVStore, *arguments: Any) -> Any:
                changed = transition(geometry, on_device(store), *arguments)
                return in_host(changed) if also is None else (in_host(changed[0]), changed[1])

            mapped = jax.shard_map(
                local,
                mesh=mesh,
                in_specs=(specs, *inputs),
                out_specs=specs if also is None else (specs, also),
                check_vma=False,
            )
            return jax.jit(
                mapped,
                donate_argnums=0,
                out_shardings=shardings if also is None else (shardings, None),
                compiler_options=options,
            )

        self.move = jit(_move, EVERYWHERE)
        self.write = jit(_write, EVERYWHERE, _BY_ROW, _BY_ROW)
        self.lease = jit(_lease, EVERYWHERE, EVERYWHERE)
        self.set_staging_pages = jit(_set_staging_pages, EVERYWHERE)
        self.decay = jit(_decay, also=EVERYWHERE)
        self.read = jax.jit(
            jax.shard_map(
                lambda store, pages: _read(on_device(store), pages),
                mesh=mesh,
                in_specs=(specs, EVERYWHERE),
                out_specs=(_BY_ROW, _BY_ROW),
                check_vma=False,
            ),
            compiler_options=options,
        )


compiled_transitions = cache_compiled(Transitions)
"""`Transitions` that are shared by all stores of the same geometry and mesh in a process."""


def _move(geometry: KVGeometry, store: KVStore, moves: MoveList) -> KVStore:
    pages, device_pages, host_pages = moves.maps.T
    pages = jnp.where(pages >= 0, pages, geometry.num_pages)
    offloads, onloads, copies, key_copies = map(jnp.asarray, moves[:4])
    slab, host = store.slab, store.host
    if host is not None:
        host_slab = offload_pages(slab, host.slab, offloads)
        slab = onload_pages(slab, host_slab, onloads)
        freed = jnp.where((device_pages < 0) & (host_pages < 0), pages, geometry.num_pages)
        selections = host.selections.at[freed].set(0, mode="drop")
        host = dataclasses.replace(host, slab=host_slab, selections=selections)
    return dataclasses.replace(
        store,
        slab=copy_pages(slab, copies),
        index_keys=copy_pages(store.index_keys, key_copies),
        device_page_index=store.device_page_index.at[pages].set(device_pages, mode="drop"),
        host_page_index=store.host_page_index.at[pages].set(host_pages, mode="drop"),
        host=host,
    )


def _lease(
    geometry: KVGeometry,
    store: KVStore,
    slots: Int[Array, " changes"],
    pages: Int[Array, "changes row_cache_pages"],
) -> KVStore:
    assert store.host is not None
    return dataclasses.replace(store, host=store.host.lease(slots, pages))


def _set_staging_pages(
    geometry: KVGeometry, store: KVStore, pages: Int[Array, " staging"]
) -> KVStore:
    assert store.host is not None
    return dataclasses.replace(store, host=dataclasses.replace(store.host, staging_page=pages))


def _decay(geometry: KVGeometry, store: KVStore) -> tuple[KVStore, Float[Array, " pages"]]:
    assert store.host is not None
    selections = store.host.selections
    host = dataclasses.replace(store.host, selections=selections / 2)
    return dataclasses.replace(store, host=host), lax.psum(selections, MESH_AXIS)


def _write(
    geometry: KVGeometry,
    store: KVStore,
    pages: Int[Array, " pages"],
    rows: PageRows,
    keys: PageKeys,
) -> KVStore:
    known = jnp.maximum(pages, 0)

    def target(device_pages: Array, beyond: int) -> jax.Array:
        return jnp.where((pages >= 0) & (device_pages >= 0), device_pages, beyond)

    on_device = target(store.device_page_index[known], geometry.device_pages)
    by_layer = (2, 0, 1, 3)
    pages_by_layer = rows.transpose(by_layer)
    slab = store.slab.at[:, on_device].set(pages_by_layer, mode="drop")
    index_keys = store.index_keys.at[:, target(pages, geometry.num_pages)].set(
        keys.transpose(by_layer), mode="drop"
    )
    host = store.host
    if host is not None:
        host_pages = store.host_page_index[known]
        moves = _moves((pages >= 0) & (host_pages >= 0), jnp.arange(pages.shape[0]), host_pages)
        host = dataclasses.replace(host, slab=offload_pages(pages_by_layer, host.slab, moves))
    return dataclasses.replace(store, slab=slab, index_keys=index_keys, host=host)


def _read(store: KVStore, pages: Int[Array, " pages"]) -> tuple[PageRows, PageKeys]:
    known = jnp.maximum(pages, 0)
    device_pages = store.device_page_index[known]
    by_layer = store.slab[:, jnp.maximum(device_pages, 0)]
    if store.host is not None:
        host_pages = store.host_page_index[known]
        moves = _moves(
            (device_pages < 0) & (host_pages >= 0), host_pages, jnp.arange(pages.shape[0])
        )
        by_layer = onload_pages(by_layer, store.host.slab, moves)
    return by_layer.transpose(1, 2, 0, 3), store.index_keys[:, known].transpose(1, 2, 0, 3)


def _moves(
    wanted: Bool[Array, " pages"], sources: Int[Array, " pages"], targets: Int[Array, " pages"]
) -> Int[Array, "pages 2"]:
    """The wanted moves, then padding."""
    order = jnp.argsort(~wanted, stable=True)
    moves = jnp.where(wanted[:, None], jnp.stack([sources, targets], axis=1), -1)
    return moves[order].astype(jnp.int32)
