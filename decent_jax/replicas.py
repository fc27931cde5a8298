"""The stacked state: every leaf has a leading replica dimension, sharded over the mesh.

`Placement` maps replicas to devices and runs per-replica code there. The other functions work on
the whole stack (its mean, the distance from the mean, a change of its size). They are plain
functions of arrays: call them with or without `jax.jit`, on sharded arrays too.
"""

import dataclasses
import math
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from decent_jax.gossip.permute import at_least_float32, clean
from decent_jax.ground.format import shown
from decent_jax.ground.pytree import PyTree


def __dir__() -> list[str]:
    names = [name for name, x in globals().items() if getattr(x, "__module__", "") == __name__]
    return sorted(name for name in names if not name.startswith("_"))


class TrainState(NamedTuple):
    """Everything a training step changes; every leaf is stacked, (n, ...)."""

    params: PyTree
    model_state: PyTree
    opt_state: PyTree


Code = Callable[..., PyTree]  # a function for one device or one replica
_ARRAYS: Any = (jax.Array, np.ndarray, jax.ShapeDtypeStruct)


@dataclasses.dataclass(frozen=True)
class Placement:
    """``num_replicas`` replicas on the devices of a mesh axis ``"replica"``, a block per device.

    Replica i is row ``i % block`` of device ``i // block``. Built by `place`.

    If a replica is too large for a device, a second mesh axis ``"fsdp"`` counts the devices of a
    replica, over which its arrays (`sharding`) and the examples of its batch are sharded. XLA
    partitions per-replica code over that axis; the code itself names only ``"replica"``.
    """

    num_replicas: int
    mesh: Mesh

    @property
    def block(self) -> int:
        """Replicas on one device."""
        return self.num_replicas // self.mesh.shape["replica"]

    @property
    def fsdp(self) -> int:
        """Devices of one replica."""
        return self.mesh.shape.get("fsdp", 1)

    @property
    def platform(self) -> str:
        """The platform of the devices, as jax calls it: ``"cpu"``, ``"gpu"`` or ``"tpu"``."""
        return self.mesh.devices.flat[0].platform

    @property
    def device_of_each(self) -> list[jax.Device]:
        """The device of each replica; the first one if a replica has several."""
        first = self.mesh.devices.reshape(-1, self.fsdp)[:, 0]
        return [device for device in first for _ in range(self.block)]

    @property
    def axis_name(self) -> str | tuple[str, str]:
        """The name, in per-replica code, of the axis that counts all replicas."""
        return "replica" if self.block == 1 else ("replica", "block")

    @property
    def stacked(self) -> NamedSharding:
        """The sharding of stacked arrays (n, ...) in which each replica's array stays whole."""
        return NamedSharding(self.mesh, P("replica"))

    def sharding(self, shape: tuple[int, ...]) -> NamedSharding:
        """The sharding of a stacked array (n, ...) of the training state.

        The largest dimension that ``fsdp`` divides (the first if several are largest) is sharded
        over the devices of a replica. Arrays without such a dimension are replicated on them.
        """
        return self._sharded(shape, range(1, len(shape)))

    def sharding_of_batch(self, shape: tuple[int, ...]) -> NamedSharding:
        """The sharding of stacked examples (n, B, ...): B is sharded if ``fsdp`` divides it."""
        return self._sharded(shape, range(1, min(len(shape), 2)))

    def place_all(self, tree: PyTree) -> PyTree:
        """The training state with its arrays constrained to `sharding`, inside `jax.jit`."""

        def constrained(x: jax.Array) -> jax.Array:
            return jax.lax.with_sharding_constraint(x, self.sharding(x.shape))  # pyright: ignore

        return jax.tree.map(constrained, tree)

    def _sharded(self, shape: tuple[int, ...], dimensions: Iterable[int]) -> NamedSharding:
        fits = [d for d in dimensions if shape[d] % self.fsdp == 0 and shape[d]]
        if self.fsdp == 1 or not fits:
            return self.stacked
        largest = max(fits, key=lambda d: shape[d])
        return NamedSharding(self.mesh, P("replica", *[None] * (largest - 1), "fsdp"))

    @property
    def replicated(self) -> NamedSharding:
        """The sharding of arrays that are replicated on every device."""
        return NamedSharding(self.mesh, P())

    @property
    def local_replicas(self) -> list[int]:
        """The replicas on this process's devices, in the order of the mesh."""
        devices = enumerate(self.mesh.devices.reshape(-1, self.fsdp)[:, 0])
        local = [k for k, device in devices if device.process_index == jax.process_index()]
        return [k * self.block + row for k in local for row in range(self.block)]

    def put(self, local: PyTree) -> PyTree:
        """Global arrays (n, B, ...) from host arrays (L, B, ...) stacked over `local_replicas`.

        The B examples of a replica are sharded over its devices if ``fsdp`` divides B.
        """
        rows = {replica: row for row, replica in enumerate(self.local_replicas)}

        def put(x: np.ndarray) -> jax.Array:
            shape = (self.num_replicas, *x.shape[1:])

            def shard(index: Any) -> np.ndarray:
                row = rows[index[0].start or 0]
                return x[row : row + self.block, *index[1:]]

            return jax.make_array_from_callback(shape, self.sharding_of_batch(shape), shard)

        return jax.tree.map(put, local)

    def on(self, device: jax.Device) -> "Placement":
        """A placement of one device's block of replicas alone."""
        return place(self.block, [device])

    def on_devices(self, body: Code, in_specs: PyTree, out_specs: PyTree) -> Code:
        """``jax.shard_map`` of code for one device, which sees (block, ...) of stacked arrays.

        If a replica has several devices, ``body`` is code for one replica, which XLA partitions.
        """
        return jax.shard_map(
            body,
            mesh=self.mesh,
            in_specs=in_specs,
            out_specs=out_specs,
            axis_names={"replica"},
            check_vma=False,  # blocks and means of groups need this
        )

    def per_replica(self, fn: Code) -> Code:
        """Code for one replica, applied to (block, ...) arguments inside `on_devices`.

        It is `jax.vmap` even for a block of one, because XLA's CPU compiler updates arrays in place
        if they keep their dimensions, but copies those that lose one and regain it.
        """
        return jax.vmap(fn, axis_name="block" if self.block > 1 else None)

    def per_replica_alone(self, fn: Code, *, loop: bool = False) -> Code:
        """Like `per_replica`, for code without communication: a single replica is not vmapped.

        ``loop=True`` runs the replicas of a block sequentially (`jax.lax.map`), which needs less
        memory.
        """

        def alone(*args: PyTree) -> PyTree:
            return jax.tree.map(_as_row, fn(*take(args, 0)))

        def of_one(own: tuple[PyTree, ...]) -> PyTree:
            return fn(*own)

        def in_turn(*args: PyTree) -> PyTree:
            return jax.lax.map(of_one, args)  # pyright: ignore

        return alone if self.block == 1 else in_turn if loop else self.per_replica(fn)

    def replica_ids(self) -> jax.Array:
        """(block,) int32: the replicas that this device holds, inside `on_devices`."""
        first = jax.lax.axis_index("replica") * self.block
        return first + jnp.arange(self.block, dtype=jnp.int32)


def place(num_replicas: int, devices: Sequence[Any] | None = None, fsdp: int = 1) -> Placement:
    """Places replicas on devices.

    Args:
      num_replicas: n.
      devices: in the order of the replicas; None: all devices of all processes.
      fsdp: the number of devices per replica, consecutive in ``devices``.

    Raises:
      ValueError: the number of devices does not divide the number of replicas; or, with ``fsdp``
        above 1, a replica does not have ``fsdp`` devices, all of one process.
    """
    devices = list(jax.devices() if devices is None else devices)
    auto = AxisType.Auto
    if fsdp == 1:
        if num_replicas % len(devices):
            raise ValueError(
                f"{num_replicas} replicas cannot be spread evenly over {len(devices)} devices; "
                f"use a multiple of {len(devices)} replicas, or fewer devices"
            )
        return Placement(num_replicas, Mesh(np.array(devices), ("replica",), axis_types=(auto,)))
    if len(devices) != num_replicas * fsdp:
        raise ValueError(
            f"{num_replicas} replicas of {fsdp} devices each need {num_replicas * fsdp} devices, "
            f"got {len(devices)}; with several devices per replica, a device holds only one replica"
        )
    grid = np.array(devices).reshape(num_replicas, fsdp)
    for i, row in enumerate(grid):
        if len({device.process_index for device in row}) > 1:
            raise ValueError(
                f"the {fsdp} devices of replica {i} belong to several processes; use a number of "
                "devices per replica that divides the number of devices per process"
            )
    mesh = Mesh(grid, ("replica", "fsdp"), axis_types=(auto, auto))
    return Placement(num_replicas, mesh)


def create(init: Code, num_replicas: int, key: jax.Array, *, identical: bool = True) -> PyTree:
    """A stacked tree: the same ``init(key)`` for every replica, or a separate draw for each.

    Args:
      init: a function from a PRNG key to a pytree.
      num_replicas: n, the size of the leading dimension.
      key: a PRNG key.
      identical: True: all are ``init(key)``; False: replica i is ``init(split(key, n)[i])``, with
        `jax.random.split`.
    """
    if identical:
        return broadcast(init(key), num_replicas)

    def draw(key: jax.Array) -> PyTree:
        return _arrays(init(key))

    return jax.vmap(draw)(jax.random.split(key, num_replicas))


def broadcast(tree: PyTree, num_replicas: int) -> PyTree:
    """The tree, stacked ``num_replicas`` times: every leaf (n, ...)."""

    def stack(x: jax.Array) -> jax.Array:
        return jnp.broadcast_to(x[None], (num_replicas, *x.shape))

    return jax.tree.map(stack, _arrays(tree))


def _as_row(x: jax.Array) -> jax.Array:
    return x[None]


def _arrays(tree: PyTree) -> PyTree:
    """The tree with numbers as arrays; raises TypeError, which names the leaf, for other types."""

    def array(path: jax.tree_util.KeyPath, x: PyTree) -> PyTree:
        if isinstance(x, _ARRAYS):
            return x
        if isinstance(x, np.generic | bool | int | float | complex):
            return jnp.asarray(x)
        name = jax.tree_util.keystr(path) or "the tree"
        raise TypeError(
            f"replicas hold arrays only, and {name} is {shown(x)}; keep it out of the tree "
            "(equinox.partition(model, equinox.is_inexact_array) splits off the arrays)"
        )

    return jax.tree_util.tree_map_with_path(array, tree)


def take(stacked: PyTree, replica: int) -> PyTree:
    """The tree of one replica, without the replica dimension."""
    return jax.tree.map(operator.itemgetter(replica), stacked)


def finite(stacked: PyTree) -> jax.Array:
    """(n,) bool: which replicas hold only finite numbers."""
    leaves = jax.tree.leaves(stacked)
    flags = [_finite(x) for x in leaves if jnp.issubdtype(x.dtype, jnp.inexact)]
    rows = len(leaves[0]) if leaves else 0
    return jnp.stack(flags).all(axis=0) if flags else jnp.ones(rows, bool)


def _finite(x: jax.Array) -> jax.Array:
    """(n,) bool: which rows are finite."""
    return jnp.isfinite(x).reshape(len(x), math.prod(x.shape[1:])).all(axis=1)


def consensus_mean(
    stacked: PyTree, weights: jax.Array | None = None, counts: jax.Array | None = None
) -> PyTree:
    """The consensus model: the mean over the replicas that are finite.

    Integers, such as step counts, take the largest value, and random keys take the first. An array
    that is not finite on any replica, such as an optimizer's best loss before the first step, is
    averaged over all replicas and keeps its infinities.

    Args:
      stacked: arrays (n, ...).
      weights: (n,) weight of each replica, see `decent_jax.optim.consensus_weights`; None: equal
        weights.
      counts: (n,) bool, which replicas count; None: the finite ones. For an optimizer state, pass
        ``finite(params)``, because the parameters decide whether a replica is lost.
    """
    ok = _sound(stacked) if counts is None else counts

    def mean(x: jax.Array) -> jax.Array:
        if not jnp.issubdtype(x.dtype, jnp.inexact):
            return _mean(x, ok)
        rows = ok & _finite(x)
        return _mean(x, jnp.where(rows.any(), rows, ok), weights).astype(x.dtype)

    return jax.tree.map(mean, stacked)


def _sound(stacked: PyTree) -> jax.Array:
    """`finite`, ignoring arrays that are not finite on any replica."""
    flags = [_finite(x) for x in jax.tree.leaves(stacked) if jnp.issubdtype(x.dtype, jnp.inexact)]
    return finite([jnp.where(of_x | ~of_x.any(), 0.0, jnp.nan) for of_x in flags])


def _mean(x: jax.Array, ok: jax.Array, weights: jax.Array | None = None) -> jax.Array:
    """The mean of the ``ok`` rows, in at least float32; the maximum of integers."""
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return x[0]
    if not jnp.issubdtype(x.dtype, jnp.inexact):
        return x.max(axis=0)
    # A product with a row of ones, because XLA's CPU sum over replicas is 100 times slower.
    wide = at_least_float32(x)
    rows = clean(x, ok).astype(wide)
    counts = ok.astype(wide) if weights is None else jnp.where(ok, weights, 0).astype(wide)
    sharding = jax.typeof(x).sharding  # jax needs the result's sharding along Explicit axes
    total = jnp.tensordot(
        counts,
        rows,
        axes=1,
        precision=jax.lax.Precision.HIGHEST,
        out_sharding=sharding.update(spec=sharding.spec[1:]) if any(sharding.spec) else None,
    )
    return total / counts.sum()


class Consensus(NamedTuple):
    """Distances of the replicas from their mean, float32 each."""

    distance: jax.Array  # shape=(): sqrt(mean_i ||x_i - mean||^2) over the finite replicas
    relative: jax.Array  # shape=(): distance / ||mean||


def consensus_distance(stacked: PyTree) -> Consensus:
    """Distances of the replicas from their mean, in float32, over all leaves at once.

    Integers and random keys are ignored.
    """
    stacked = [x for x in jax.tree.leaves(stacked) if jnp.issubdtype(x.dtype, jnp.inexact)]
    ok = finite(stacked)
    mean = [_mean(x, ok) for x in stacked]

    def squares(x: jax.Array, centre: jax.Array) -> jax.Array:
        gap = jnp.abs(clean(x - centre[None], ok)).astype(jnp.float32)
        return jnp.square(gap).reshape(len(x), math.prod(x.shape[1:])).sum(axis=1)

    of_replica = jnp.asarray(sum(map(squares, stacked, mean)))
    norm = sum(jnp.square(jnp.abs(x).astype(jnp.float32)).sum() for x in mean)
    distance = jnp.sqrt(of_replica.sum() / ok.sum())
    return Consensus(distance, distance / jnp.sqrt(norm))


def resize(
    stacked: PyTree,
    num_replicas: int,
    weights: jax.Array | None = None,
    counts: jax.Array | None = None,
) -> PyTree:
    """The tree for another number of replicas, all equal to the `consensus_mean`."""
    return broadcast(consensus_mean(stacked, weights, counts), num_replicas)
