"""How per-replica code finds out, from the names of its axes, which replicas a device holds."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from decent_jax.topology import Schedule

AxisName = str | tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class ReplicaAxis:
    """The axis that counts the replicas: ``devices`` on a mesh axis, ``block`` rows on each.

    Replica i is row ``i % block`` of device ``i // block``.
    """

    device_axis: str | None
    block_axis: str | None
    devices: int
    block: int

    @staticmethod
    def of(schedule: Schedule, axis_name: AxisName) -> "ReplicaAxis":
        """The axis ``axis_name``, which must hold the schedule's replicas."""
        axis = ReplicaAxis.over(axis_name)
        held = axis.devices * axis.block
        if held != schedule.num_replicas:
            raise ValueError(
                f"the schedule {schedule.name!r} is for {schedule.num_replicas} replicas, but "
                f"axis {axis_name!r} holds {held}; make the schedule for {held}, or vmap the rest "
                "with an axis of its own and pass axis_name=(mesh axis, vmapped axis)"
            )
        return axis

    @staticmethod
    def over(axis_name: AxisName) -> "ReplicaAxis":
        """The axis of that name, or of those: a mesh axis, a vmapped axis, or one of each."""
        names = (axis_name,) if isinstance(axis_name, str) else tuple(axis_name)
        manual = jax.sharding.get_abstract_mesh().manual_axes
        device_axes = [name for name in names if name in manual]
        block_axes = [name for name in names if name not in manual]
        sizes = {name: jax.lax.axis_size(name) for name in names}
        if len(device_axes) > 1 or len(block_axes) > 1 or names != (*device_axes, *block_axes):
            raise ValueError(
                "axis_name must be one axis, or a mesh axis followed by a vmapped axis, "
                f"got {axis_name!r}"
            )
        device, block = next(iter(device_axes), None), next(iter(block_axes), None)
        held = [sizes[name] if name else 1 for name in (device, block)]
        return ReplicaAxis(device, block, *held)

    def lift(self, x: jax.Array) -> jax.Array:
        """This device's rows (block, ...): under vmap the batched array itself, not a message."""
        if self.block_axis is None:
            return x[None]
        if self.checks_vma(x):  # jax 0.10-0.12: all_gather over vmap fails there
            raise ValueError(
                f"replicas vmapped over {self.block_axis!r} inside jax.shard_map need "
                "jax.shard_map(..., check_vma=False)"
            )
        return jax.lax.all_gather(x, self.block_axis)

    def drop(self, rows: jax.Array) -> jax.Array:
        """The replica's own row of (block, ...)."""
        if self.block_axis is None:
            return rows[0]
        row = jax.lax.axis_index(self.block_axis)
        return jax.lax.dynamic_index_in_dim(rows, row, keepdims=False)

    def replica(self) -> jax.Array:
        """() int32: the number of this replica."""
        row = 0 if self.block_axis is None else jax.lax.axis_index(self.block_axis)
        if self.device_axis is None:
            return jnp.asarray(row)
        return jax.lax.axis_index(self.device_axis) * self.block + row

    def rows(self, per_replica: np.ndarray) -> jax.Array:
        """This device's (block,) part of a constant given for every replica (n,)."""
        table = jnp.asarray(per_replica).reshape(self.devices, self.block)
        if self.device_axis is None:
            return table[0]
        return table[jax.lax.axis_index(self.device_axis)]

    def checks_vma(self, x: jax.Array) -> bool:
        """Whether ``x`` is traced inside ``shard_map(check_vma=True)`` over the mesh axis."""
        # `mat` is not documented (jax 0.10 to 0.12). Once jax says by a public function which axes
        # a traced array varies over, or `all_gather` over a vmapped axis works there, use that.
        return self.device_axis in jax.typeof(x).mat.varying


def beside(flags: jax.Array, rows: jax.Array) -> jax.Array:
    """(block,) reshaped to broadcast with (block, ...), so that no rank is promoted."""
    return flags.reshape(flags.shape + (1,) * (rows.ndim - 1))
