"""Checkpoints: the whole state of every replica, written in the background, checked when read.

``checkpoints/STEP`` holds three items: ``params`` (stacked, so that a model can be exported
without its optimizer), ``rest`` (model state, optimizer state, moving average) and ``meta`` (step,
replicas, config, position, a checksum of every array). ``best/STEP`` holds the consensus model
with the lowest validation loss. orbax gives a checkpoint its name once it is whole.
"""

import contextlib
import gc
import io
import json
import logging
import re
import sys
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils

from decent_jax import optim, replicas
from decent_jax.ground.errors import CheckpointError
from decent_jax.ground.json_files import read_json
from decent_jax.ground.replaceable import check_removable
from decent_jax.replicas import Placement
from decent_jax.train.step import TrainState

log = logging.getLogger(__name__)

# The own state of a method was a dict (until 0.1); its keys, and the fields they are now.
_NAMES_BEFORE = {"public": "x_hat", "around": "s", "adapted": "psi", "tracked": "q"}
_NAMES_BEFORE |= {"gradient": "g", "weight": "w", "momentum": "m", "mu": "m", "nu": "v"}
_NAMES_BEFORE |= {"start": "x_0", "slow": "u", "outer": "theta", "distance": "y"}

FOLDER, BEST, DAMAGED = "checkpoints", "best", "damaged"
# Of orbax; then of `decent_jax.pipelines`.
_ITEMS = re.compile(
    "(params|rest|meta|model_state)/|_CHECKPOINT_METADATA|commit_success.txt|"
    r"stage-\d+\.replica-\d+\.npz|manifest\.json|\.manifest\.json\.\d+\.tmp"
)


class Checkpointer:
    """Saves and restores the state of a run in ``workdir``; all processes call it alike."""

    def __init__(self, workdir: str | Path, keep: int):
        self.workdir = Path(workdir).absolute()
        self._manager = _manager(self.workdir / FOLDER, keep)
        self._best = _manager(self.workdir / BEST, 1)
        self._saved = -1  # the last step; not asked of the disk, where processes see it change

    def steps(self) -> list[int]:
        """Steps with a finished checkpoint, the oldest first."""
        return sorted(self._manager.all_steps())

    def save(self, step: int, state: TrainState, meta: dict) -> None:
        """Copy the state to the host, and write it in the background."""
        if step == self._saved:
            return
        self._saved = step
        rest = state._replace(params=None)
        meta = meta | {"step": step, "checksums": _checksums(state)}
        meta["checksum"] = _checksum_of_meta(meta)
        with _writing(self.workdir):
            self._best.wait_until_finished()  # the best that this checkpoint knows of is there, too
            self._manager.save(
                step,
                args=ocp.args.Composite(
                    params=ocp.args.StandardSave(state.params),
                    rest=ocp.args.StandardSave(rest),
                    meta=ocp.args.JsonSave(meta),
                ),
                force=True,
            )

    def save_best(self, step: int, params: Any, model_state: Any, meta: dict) -> None:
        """Keep the consensus model (no replica dimension) as the best so far."""
        # orbax saves no empty trees
        state = {"model_state": ocp.args.StandardSave(model_state)} if model_state else {}
        with _writing(self.workdir):
            # Two managers that write at once in several processes share orbax's barrier names.
            self._manager.wait_until_finished()
            self._best.save(
                step,
                args=ocp.args.Composite(
                    params=ocp.args.StandardSave(params),
                    meta=ocp.args.JsonSave(meta | {"step": step}),
                    **state,
                ),
                force=True,
            )

    def drop_best_after(self, step: int) -> bool:
        """Forget best models of steps yet to be reached by a resumed run; whether one is left."""
        steps = self._best.all_steps()
        for later in [s for s in steps if s > step]:
            self._best.delete(later)
        self._best.reload()
        return any(s <= step for s in steps)

    def restore_newest(
        self, like: TrainState, placement: Placement, accum_steps: int, say=log.warning
    ) -> tuple[TrainState, dict] | None:
        """The newest checkpoint that is whole, with its meta; None where there is none.

        Args:
          like: shapes and dtypes of the state (n, ...), as `jax.eval_shape` gives them.
          placement: where it goes. A checkpoint of another number of replicas becomes the mean of
            its replicas: parameters, moments and moving average; a window of accumulated
            gradients that had begun is dropped.
          accum_steps: the window of accumulated Adam.
          say: called with a sentence for everything the user should know.

        Raises:
          CheckpointError: there are checkpoints, and none can be read.
        """
        failures = []
        for step in reversed(self.steps()):
            found, reason = _attempted(self._restore, step, like, placement)
            if reason:
                failures.append(f"step {step} ({reason})")
                say(f"the checkpoint of step {step} is damaged: {reason}")
                continue
            state, meta = found
            for damaged in [s for s in self.steps() if s > step]:
                say(f"the checkpoint of step {damaged} was moved to {self.workdir / DAMAGED}")
                self._put_aside(damaged)
            if meta["num_replicas"] != placement.num_replicas:
                state = change_replicas(state, placement, accum_steps)
                say(change_of(meta["num_replicas"], placement.num_replicas))
            self._saved = step
            return state, meta
        if failures:
            raise CheckpointError(
                f"no checkpoint in {self.workdir / FOLDER} can be read: {'; '.join(failures)}"
            )
        return None

    def check(self) -> None:
        """Nothing: orbax reports what it could not write when the next one is saved."""

    def close(self) -> None:
        """Wait until everything is written."""
        with _writing(self.workdir):
            self.wait()
            self._manager.close()
            self._best.close()

    def wait(self) -> None:
        """Wait until everything saved so far is on disk."""
        with _writing(self.workdir):
            self._manager.wait_until_finished()
            self._best.wait_until_finished()

    def _restore(self, step, like, placement):
        meta = self._manager.restore(step, args=ocp.args.Composite(meta=ocp.args.JsonRestore()))
        meta = meta["meta"]
        if not isinstance(meta, dict) or _checksum_of_meta(meta) != meta.get("checksum"):
            raise ValueError("its meta does not match the checksum taken when it was saved")
        if meta["step"] != step:
            raise ValueError("its meta is of another step")
        n_old = meta["num_replicas"]
        had_ema = bool(meta["config"]["eval.ema_decay"])
        wants_ema = like.ema is not None
        like = like._replace(ema=like.params if had_ema else None)
        own = like.opt_state.own
        names = self._names_before(step, own)
        if names is not None:
            like = _with_own(like, {old: getattr(own, new) for old, new in names.items()})
        whole = n_old % placement.mesh.shape["replica"] == 0

        def target(x):
            shape = (n_old, *x.shape[1:])
            sharding = placement.sharding(shape) if whole else placement.replicated
            return jax.ShapeDtypeStruct(shape, x.dtype, sharding=sharding)

        restored = self._manager.restore(
            step,
            args=ocp.args.Composite(
                params=ocp.args.StandardRestore(jax.tree.map(target, like.params)),
                rest=ocp.args.StandardRestore(jax.tree.map(target, like._replace(params=None))),
            ),
        )
        state = restored["rest"]._replace(params=restored["params"])
        if _checksums(state) != meta["checksums"]:
            raise ValueError("its arrays do not match the checksums taken when it was saved")
        if names is not None:
            found = state.opt_state.own
            own = own._replace(**{new: found[old] for old, new in names.items()})
            state = _with_own(state, own)
        if wants_ema != had_ema:  # a moving average begins here, or is no longer wanted
            state = state._replace(ema=jax.tree.map(jnp.copy, state.params) if wants_ema else None)
        return state, meta

    def _names_before(self, step, own) -> dict[str, str] | None:
        """{name in the checkpoint: field of ``own``} where an earlier version wrote a dict."""
        if not own:
            return None
        logging.getLogger("absl").setLevel(logging.ERROR)  # orbax warns of an item read on its own
        with ocp.PyTreeCheckpointer() as reader:
            rest = reader.metadata(self.workdir / FOLDER / str(step) / "rest")
        stored = rest.item_metadata.tree["opt_state"]["own"]
        if set(stored) == set(own._fields):
            return None
        return {str(name): _NAMES_BEFORE.get(str(name), str(name)) for name in stored}

    def _put_aside(self, step: int) -> None:
        if jax.process_index() == 0:
            put_aside(self.workdir, step)
        multihost_utils.sync_global_devices("damaged checkpoint put aside")
        self._manager.reload()


def put_aside(workdir: Path, step: int) -> None:
    """Move a damaged checkpoint out of the way of those to come."""
    target = workdir / DAMAGED / str(step)
    target.parent.mkdir(exist_ok=True)
    number = 1
    while target.exists():
        number += 1
        target = target.with_name(f"{step}-{number}")
    (workdir / FOLDER / str(step)).rename(target)


def change_of(before: int, now: int) -> str:
    """What `change_replicas` does, for the log."""
    return (
        f"the checkpoint has {before} replicas and this run {now}: every replica continues from "
        "the mean of the old ones (parameters and moments); an unfinished window of gradients is "
        "dropped"
    )


def change_replicas(state: TrainState, placement: Placement, accum_steps: int) -> TrainState:
    """Stacked state of another number of replicas: all at the mean, windows dropped."""

    @jax.jit
    def change(state):
        skipped = state.opt_state.skipped.sum()
        weights = optim.consensus_weights(state.opt_state)
        state = replicas.resize(state, placement.num_replicas, weights)
        state = _with_own(state, optim.with_equal_weights(state.opt_state.own))
        opt_state = optim.drop_window(state.opt_state, accum_steps)
        # Updates skipped since the start keep their sum; whose they were is forgotten.
        none = jnp.zeros_like(opt_state.skipped)
        opt_state = opt_state._replace(skipped=none.at[0].set(skipped))
        return placement.place_all(state._replace(opt_state=opt_state))

    return change(state)


def restore_model(workdir: str | Path, which: str) -> tuple[Any, dict]:
    """One model of a run, for export and sampling: host arrays without the replica dimension.

    Args:
      workdir: of the run.
      which: ``"best"``, the consensus model with the lowest validation loss, or ``"last"``, the
        consensus of the newest checkpoint.

    Returns:
      (params, meta); ``meta["step"]`` says of which step.

    Raises:
      CheckpointError: there is none.
    """
    folder = Path(workdir).absolute() / (BEST if which == "best" else FOLDER)
    steps = sorted(int(path.name) for path in folder.glob("*") if path.name.isdecimal())
    failures = []
    for step in reversed(steps):
        try:
            params = read_item(folder / str(step) / "params")
            meta = read_json(folder / str(step) / "meta" / "metadata")
            if not isinstance(meta, dict) or meta.get("step") != step:
                raise ValueError("its meta is of another step")
            weights = _weights_of(folder / str(step), meta) if which != "best" else None
        except (CheckpointError, OSError, ValueError) as error:
            failures.append(f"the {which} checkpoint of step {step} is damaged: {error}")
            continue
        for failure in failures:
            log.warning(failure)
        if which != "best":
            mean = jax.jit(replicas.consensus_mean)(params, weights)
            params = jax.device_get(mean)
        return params, meta
    found = f"; {failures[0]}" if failures else ""
    raise CheckpointError(
        f"{folder} holds no checkpoint that can be read (found steps {steps}{found}); train first, "
        "or name another --workdir"
    )


def _weights_of(folder: Path, meta: dict) -> Any:
    """How much each replica counts in the consensus model of a checkpoint; None: alike."""
    config = meta.get("config")
    if not isinstance(config, dict) or config.get("algorithm") != "push_sum":
        return None
    own = read_item(folder / "rest", "opt_state")["own"]
    return own["weight" if "weight" in own else "w"]


def read_item(item: Path, part: str | None = None) -> Any:
    """An item of a checkpoint, or a part of it alone, as host arrays.

    Args:
      item: its folder, such as ``checkpoints/100/rest``.
      part: such as ``"model_state"`` of the rest.

    Raises:
      CheckpointError: it is not there, or cannot be read.
    """
    if not item.is_dir():
        raise CheckpointError(f"there is no checkpoint {item}")
    logging.getLogger("absl").setLevel(logging.ERROR)  # orbax warns of an item read on its own

    def read():
        with ocp.PyTreeCheckpointer() as checkpointer:
            about = checkpointer.metadata(item).item_metadata
            if about is None:
                raise ValueError("its _METADATA is damaged")
            like = about.tree
            if part:
                like = {part: like[part]}
            arguments = ocp.args.PyTreeRestore(
                item=like,
                restore_args=jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), like),
                partial_restore=True,
            )
            found = checkpointer.restore(item, args=arguments)
        return found[part] if part else found

    found, reason = _attempted(read)
    if reason:
        raise CheckpointError(f"{item} cannot be read: {reason}")
    return found


def _attempted(read: Callable[..., Any], *args: Any) -> tuple[Any, str]:
    """(what ``read(*args)`` returns, ""), or (None, why it failed).

    A read that fails leaves threads and coroutines of orbax that print their own tracebacks.
    """
    hook, sys.unraisablehook = sys.unraisablehook, lambda _: None
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            try:
                return read(*args), ""
            except Exception as error:  # orbax and tensorstore raise many kinds
                reason = _reason(error)
            time.sleep(0.2)  # until they have met the end of their event loop
            gc.collect()
            return None, reason
    finally:
        sys.unraisablehook = hook


def _with_own(state: TrainState, own: Any) -> TrainState:
    return state._replace(opt_state=state.opt_state._replace(own=own))


def _manager(folder: Path, keep: int) -> ocp.CheckpointManager:
    """Raises CheckpointError where orbax cannot make sense of what is there."""
    try:
        return ocp.CheckpointManager(folder, options=ocp.CheckpointManagerOptions(max_to_keep=keep))
    except Exception as error:  # of many kinds
        raise CheckpointError(f"{folder} cannot be read: {_reason(error)}") from None


def _checksums(state: TrainState) -> list[int]:
    """One number per array, from its bits, which shows that a file is damaged."""
    return np.asarray(_sums_of_bits(state)).tolist()


@jax.jit
def _sums_of_bits(state):
    def one(x):
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            x = jax.random.key_data(x)
        if jnp.iscomplexobj(x):
            x = jnp.stack([x.real, x.imag])
        if x.dtype == jnp.bool_:
            x = x.astype(jnp.uint8)
        bits = jax.lax.bitcast_convert_type(x, jnp.dtype(f"uint{8 * x.dtype.itemsize}"))
        words = bits.astype(jnp.uint32) + (
            (bits >> 32).astype(jnp.uint32) if x.dtype.itemsize == 8 else jnp.uint32(0)
        )
        # Weighted by position, so that exchanged blocks do not cancel.
        weights = jax.lax.iota(jnp.uint32, words.size).reshape(words.shape) * jnp.uint32(2) + 1
        return (words * weights).sum(dtype=jnp.uint32)

    return jnp.stack([one(x) for x in jax.tree.leaves(state)])


@contextlib.contextmanager
def _writing(workdir: Path):
    """One sentence about an error in a thread of orbax, such as a full disk."""
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:
        raise failed(workdir, error) from error


def failed(workdir: Path, error: BaseException) -> CheckpointError:
    """The sentence for what has kept a checkpoint from being written."""
    return CheckpointError(f"a checkpoint could not be written to {workdir}: {_reason(error)}")


def _reason(error: BaseException) -> str:
    while error.__cause__ is not None:  # orbax and tensorstore say it in several layers
        error = error.__cause__
    text = (str(error).splitlines() or [""])[0]
    if "tree structures do not match" in text:
        return "another optimizer, or another version of it, wrote it; take another --workdir"
    text = text.partition(" [tensorstore_spec=")[0]  # a page of JSON behind the cause
    text = f"{text[:90]} ... {text[-90:]}" if len(text) > 185 else text  # the cause is at the end
    return f"{type(error).__name__}: {text}"


def check_only_ours(workdir: Path) -> None:
    """Raises ConfigError if a checkpoint, to be deleted, holds a file of somebody else."""
    for step in [path for name in (FOLDER, BEST) for path in (workdir / name).glob("*")]:
        if step.name.isdecimal() and step.is_dir():
            check_removable(step, _ITEMS)


def _checksum_of_meta(meta: dict) -> int:
    own = {name: value for name, value in meta.items() if name != "checksum"}
    return zlib.crc32(json.dumps(own, sort_keys=True).encode())
