"""The arrays of a training state on disk, written and read by orbax, verified with checksums.

A part of a checkpoint is one tree: ``params`` and ``model_state`` as the task nests them,
``weights`` (of the replicas in the consensus model; None: equal), and ``rest``, the arrays of the
optimizer's state by their paths. The `checksums` of a part are computed before it is written, and
verified whenever arrays are read.
"""

from collections.abc import Collection
from pathlib import Path
from types import ModuleType

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from decent_jax import optim, replicas
from decent_jax.cluster import start as cluster
from decent_jax.ground.errors import CheckpointError, ConfigError
from decent_jax.ground.json_files import Json
from decent_jax.ground.pytree import PyTree
from decent_jax.replicas import Placement, TrainState

STATE, STAGE = "state", "stage-"  # folder of the only part, or of the part of each pipeline stage


def tree_of(state: TrainState) -> dict[str, PyTree]:
    """The tree that a checkpoint stores for a state; see the docstring of this module."""
    rest = state._replace(params=None, model_state=None)
    return {
        "params": state.params,
        "model_state": state.model_state,
        "weights": optim.consensus_weights(state.opt_state),
        # Empty arrays, such as GaLore's projector of a bias, have nothing for orbax to write.
        "rest": {_path(path): x for path, x in jax.tree_util.tree_leaves_with_path(rest) if x.size},
    }


def check(state: PyTree) -> None:
    """Raise ConfigError if a checkpoint cannot hold a state, given as arrays or as shapes.

    Each array needs a unique name, which joins the keys of its path with dots; no array of the
    parameters or ``model_state`` may be empty.
    """
    places: dict[str, str] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        name, place = _path(path).replace("/", "."), jax.tree_util.keystr(path)
        if name in places:
            raise ConfigError(
                f"{places[name]} and {place} have the same name in a checkpoint, {name}; rename one"
            )
        if jnp.issubdtype(leaf.dtype, jnp.number) and jax.dtypes.itemsize_bits(leaf.dtype) < 8:
            raise ConfigError(
                f"{place} is {leaf.dtype}, and compiled steps take no numbers of less than 8 bits; "
                "use int8 or float8_e4m3fn"
            )
        if not leaf.size and name.startswith(("params", "model_state")):
            raise ConfigError(
                f"{place} has the shape {leaf.shape}, but a checkpoint holds no empty arrays; "
                "leave it out"
            )
        places[name] = place


def begin(writer: ocp.StandardCheckpointer, draft: Path, part: str, tree: PyTree) -> dict[str, int]:
    """Copy a part to the host for orbax to write in the background; returns its checksums.

    Call this in all processes that hold rows of the part's arrays.
    """
    sums = checksums(tree)
    writer.save(draft / part, tree, force=True)
    return sums


def restore(
    checkpoint: Path, meta: Json, like: TrainState, placement: Placement, accum_steps: int
) -> TrainState:
    """Restore the state of a checkpoint; each array comes from the first part that has it.

    Args:
      checkpoint: folder of the checkpoint.
      meta: contents of its ``meta.json``.
      like, placement, accum_steps: for the run or for one stage; see
        `decent_jax.checkpoints.on_disk.Checkpointer.restore_newest`.

    Raises:
      Exception: of any type, if any process cannot read the checkpoint.
    """
    n_old = meta["num_replicas"]
    whole = n_old % placement.mesh.shape["replica"] == 0

    def target(x):
        shape = (n_old, *x.shape[1:])
        sharding = placement.sharding(shape) if whole else placement.replicated
        return jax.ShapeDtypeStruct(shape, x.dtype, sharding=sharding)

    wanted, parts = jax.tree.map(target, tree_of(like)), meta["checksums"]
    shapes = named(wanted)
    places: dict[str, str] = {}  # {name of an array: the first part that has it}
    for part, sums in parts.items():
        places |= {name: part for name in sums if name in shapes and name not in places}
    is_other = STATE in parts and parts[STATE].keys() != shapes.keys()  # each stage has its own
    if is_other or places.keys() != shapes.keys():
        raise ValueError(
            "it is from another optimizer or another version of it; take another --workdir"
        )
    leaves_by_name, failure = {}, None
    try:
        for part in dict.fromkeys(places.values()):
            names = [name for name in shapes if places[name] == part]
            _check_kinds(checkpoint / part, {name: shapes[name] for name in names})
            leaves_by_name |= named(_restored(checkpoint / part, _only(wanted, names)))
    except Exception as error:  # orbax and tensorstore raise many kinds
        failure = error
    if cluster.any_process(failure is not None):  # no process may wait for the others
        raise failure or ValueError("another process could not read it")
    _verify(leaves_by_name, {name: parts[part][name] for name, part in places.items()})
    leaves = [leaves_by_name[name] for name in shapes]
    state = unstored(jax.tree.unflatten(jax.tree.structure(wanted), leaves), like)
    if n_old != placement.num_replicas:
        state = change_replicas(state, placement, accum_steps)
    return state


def unstored(tree: dict[str, PyTree], like: TrainState) -> TrainState:
    """The inverse of `tree_of`: the state, with the structure of ``like``."""
    paths, structure = jax.tree_util.tree_flatten_with_path(
        like._replace(params=None, model_state=None)
    )
    stored, rows = tree["rest"], len(jax.tree.leaves(tree["params"])[0])
    leaves = [
        stored[_path(at)] if x.size else jnp.zeros((rows, *x.shape[1:]), x.dtype) for at, x in paths
    ]
    rest = structure.unflatten(leaves)
    return rest._replace(params=tree["params"], model_state=tree["model_state"])


def read(checkpoint: Path, meta: Json, *items: str) -> list[PyTree]:
    """Items such as "params", merged from all parts, as host arrays.

    Raises:
      Exception: of any type, if an item cannot be read or is damaged.
    """
    merged: dict[str, PyTree] = {}
    for part, sums in meta["checksums"].items():
        with _reader() as reader:
            about = reader.metadata(checkpoint / part).item_metadata
        if about is None:
            raise ValueError("its _METADATA is damaged")
        like = {item: about.tree.get(item) for item in items}
        tree = _restored(checkpoint / part, like, host=True)
        _verify(tree, {name: s for name, s in sums.items() if name.partition("/")[0] in items})
        merged = _merged(merged, tree)
    return [merged[item] for item in items]


def _check_kinds(part: Path, wanted: dict[str, PyTree]) -> None:
    """Raise ValueError if an array in a part has another shape or dtype: orbax would convert it."""
    with _reader() as reader:
        about = reader.metadata(part).item_metadata
    for name, there in named(about.tree if about is not None else {}).items():
        sides = [there, wanted[name]] if name in wanted and hasattr(there, "shape") else []
        kinds = [(tuple(x.shape), x.dtype) for x in sides if x.dtype is not None]
        keys = any(jnp.issubdtype(dtype, jax.dtypes.prng_key) for _, dtype in kinds)
        if not keys and len(set(kinds)) > 1:
            there, here = (f"{dtype} of shape {shape[1:]}" for shape, dtype in kinds)
            raise ValueError(f"{name} is {there} there, and {here} here; take another --workdir")


def _restored(part: Path, target: PyTree, host: bool = False) -> PyTree:
    """The arrays that ``target`` names, in its shapes and shardings, or as ``host`` arrays."""
    if host:
        how = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), target)
    else:
        how = ocp.checkpoint_utils.construct_restore_args(target)
    args = ocp.args.PyTreeRestore(item=target, restore_args=how, partial_restore=True)
    with _reader() as reader:
        return reader.restore(part, args=args)


def _reader() -> ocp.Checkpointer:
    """A reader for this process alone: no other process waits for it if it fails."""
    own = jax.process_index()
    alone = ocp.options.MultiprocessingOptions(
        primary_host=own, active_processes={own}, barrier_sync_key_prefix=f"process-{own}"
    )
    handler = ocp.PyTreeCheckpointHandler(multiprocessing_options=alone)
    return ocp.Checkpointer(handler, multiprocessing_options=alone)


def _only(tree: PyTree, names: Collection[str]) -> PyTree:
    """The tree with only the leaves of these names, as nested dicts if any leaf is left out."""
    leaves = dict(jax.tree_util.tree_leaves_with_path(tree))
    chosen = {path: x for path, x in leaves.items() if _name(path) in names}
    if len(chosen) == len(leaves):
        return tree
    from flax.traverse_util import unflatten_dict  # here: flax imports all of its layers

    return unflatten_dict({tuple(key.key for key in path): x for path, x in chosen.items()})


def _merged(tree: PyTree, other: PyTree) -> PyTree:
    """Two nested dicts as one."""
    if not (isinstance(tree, dict) and isinstance(other, dict)):
        return other
    return tree | {key: _merged(tree.get(key), value) for key, value in other.items()}


# --- Checksums ------------------------------------------------------------------------------------


def named(tree: PyTree) -> dict[str, PyTree]:
    """The leaves by their names, such as "params/h/0/mlp/kernel"."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    by_name = {_name(path): leaf for path, leaf in leaves}
    if len(by_name) < len(leaves):
        raise CheckpointError("two arrays of the state have the same path; rename a parameter")
    return by_name


def _name(path: jax.tree_util.KeyPath) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/")


def _path(path: jax.tree_util.KeyPath) -> str:
    return jax.tree_util.keystr(path, simple=True, separator=".")


def checksums(tree: PyTree) -> dict[str, int]:
    """A checksum of the bits of each array, by name; shows whether a file is damaged."""
    by_name = named(tree)
    if any(isinstance(x, jax.Array) for x in by_name.values()):
        sums = np.asarray(_sums(list(by_name.values()))).tolist()
    else:
        sums = [int(_sum(np.asarray(x), np)) for x in by_name.values()]
    return dict(zip(by_name, sums, strict=True))


@jax.jit
def _sums(arrays):
    return jnp.stack([_sum(x, jnp) for x in arrays])


def _sum(x: PyTree, xp: ModuleType) -> PyTree:
    """The weighted sum of an array's 32-bit words; ``xp`` is NumPy or jax.numpy."""
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    if xp.iscomplexobj(x):
        x = xp.stack([x.real, x.imag])
    if x.dtype == bool:
        x = x.astype(xp.uint8)
    bits = x.view(f"uint{8 * x.dtype.itemsize}")
    words = bits.astype(xp.uint32)
    if x.dtype.itemsize == 8:
        words = words + (bits >> 32).astype(xp.uint32)
    # Weighted by position, so that exchanged blocks do not cancel.
    places = xp.arange(words.size, dtype=xp.uint32).reshape(words.shape)
    return (words * (places * xp.uint32(2) + xp.uint32(1))).sum(dtype=xp.uint32)


def _verify(tree: PyTree, wanted: dict[str, int]) -> None:
    if checksums(tree) != wanted:
        raise ValueError("its arrays do not match the checksums taken when it was saved")


def change_replicas(state: TrainState, placement: Placement, accum_steps: int) -> TrainState:
    """Resize a stacked state to the placement's number of replicas, all of them at the mean.

    Partial windows of accumulated gradients are dropped.
    """

    @jax.jit
    def change(state):
        skipped = state.opt_state.skipped.sum()
        weights = optim.consensus_weights(state.opt_state)
        sound = replicas.finite(state.params)
        state = replicas.resize(state, placement.num_replicas, weights, sound)
        own = optim.with_equal_weights(state.opt_state.own)
        opt_state = optim.drop_window(state.opt_state._replace(own=own), accum_steps)
        # Keep the total number of skipped updates, but not which replica skipped them.
        none = jnp.zeros_like(opt_state.skipped)
        opt_state = opt_state._replace(skipped=none.at[0].set(skipped))
        return placement.place_all(state._replace(opt_state=opt_state))

    return change(state)
