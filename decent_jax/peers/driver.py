"""The process of ``train.py``: starts the peers, watches them, and shows the run as a whole."""

import contextlib
import dataclasses
import math
import os
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import jax
import ray
from ml_collections import ConfigDict
from ray.exceptions import ActorUnavailableError, GetTimeoutError, RayError

from decent_jax.ground.errors import DataError, Interrupted, TrainingFailed
from decent_jax.ground.json_files import is_whole, read_json, write_json_atomic
from decent_jax.ground.progress import Progress
from decent_jax.peers import events, manifest, setup
from decent_jax.peers.partners import links, reduction
from decent_jax.peers.peer import Peer
from decent_jax.peers.roster import Roster
from decent_jax.peers.setup import FOLDER, Place
from decent_jax.peers.start import check_address, fate, ray_for, start_actor
from decent_jax.peers.whole import Whole, counts_of
from decent_jax.train import algorithm, loop
from decent_jax.train.checkpoint import Checkpointer
from decent_jax.train.evaluation import Evaluator
from decent_jax.train.experiment import Experiment
from decent_jax.train.metrics import MetricWriter, shown
from decent_jax.train.saver import Saver
from decent_jax.train.step import TrainState
from decent_jax.train.synchronous import init, time_steps
from decent_jax.train.workdir import Signals, Workdir

_LOOK_S, _SAVE_S = 0.2, 2.0
_COPIES = 4  # of each state in the object store
_THREADS = 32  # of a peer: it trains, is asked to meet, gives copies


def run(config: ConfigDict, workdir: str | Path) -> dict[str, Any]:
    """Train with peers as ``config`` says, in ``workdir``; resume the run that is there.

    Returns, raises: as `decent_jax.train.run`.
    """
    check_address(config, "peers")
    before = manifest.read(Path(workdir), config)
    with setup.open_run(config, workdir) as (experiment, work):
        work.config = config
        state, count = jax.eval_shape(lambda: init(experiment)), setup.count_of(config)
        held = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state))
        with ray_for(config, "peers", count, store=_COPIES * held * count):
            return _Driver(config, experiment, work, before).run()


def dry_run(config: ConfigDict) -> None:
    """Time the step of one peer here; meetings come between the steps, and nobody waits for them.

    Raises:
      ConfigError: the run would be refused.
    """
    check_address(config, "peers")
    with tempfile.TemporaryDirectory() as folder:
        place = Place(config.to_dict(), folder, 0, 0, None, config.num_replicas)
        with setup.open_peer(place) as (experiment, work):
            work.say(_describe(config, Whole(config, experiment)))
            time_steps(experiment, work, experiment.steps // config.num_replicas)


class _Live(NamedTuple):
    """A peer that the driver has started."""

    handle: Any
    future: Any  # of `Peer.train`


class _Driver:
    """One session of a run; ``before`` is the manifest of those before it."""

    def __init__(
        self, config: ConfigDict, experiment: Experiment, work: Workdir, before: dict[str, Any]
    ):
        self.config, self.experiment, self.work, self.manifest = config, experiment, work, before
        self.streams = before.get("streams", config.num_replicas)
        self.whole = Whole(config, experiment)
        self.evaluator = Evaluator(experiment.config, experiment.task, experiment.placement)
        self.live: dict[int, _Live] = {}
        self.deaths: Counter[int] = Counter()
        self.ended: list[Any] = []  # handles of peers at the end of the run
        self.gone: set[int] = set()  # slots whose peers died or left, and were not replaced
        self.unsaved = 0  # peers that were killed because they did not end
        self.leaving: set[int] = set()  # slots whose peers `resize` has told to leave
        self._said: set[str] = set()
        self._reached, self._saved = 0, 0.0
        known = config.peers.silent_s, manifest.known_steps(work.path, before)
        self.looked = Roster(*known).look()
        roster: Any = ray.remote(Roster)
        self.roster = roster.options(num_cpus=0).remote(*known)
        self.start = min(self.step(), experiment.steps)
        setup.forget(work.path, self.start + 1)
        self.saver = Saver(experiment, Checkpointer(work.path, config.checkpoint.keep))
        self.saver.restored(
            {
                "seconds": before.get("seconds", 0.0),
                "best": before.get("best") or math.inf,
                "examples": self.start * config.batch_size,
                "step": self.start,
            }
        )
        self.began = time.monotonic()

    # --- The run ----------------------------------------------------------------------------------

    def run(self) -> dict[str, Any]:
        work, steps = self.work, self.experiment.steps
        work.write_config()
        if self.start:
            work.say(f"resuming after step {self.start} of all peers together")
        work.say(_describe(self.config, self.whole))
        with self.saver:
            with (
                work.open_metrics(self.start) as writer,
                work.show_progress(steps, self.start) as progress,
                Signals() as signals,
            ):
                self._start_peers()
                self._watch(writer, progress, signals)
                state = self._evaluate(self.ended, steps, writer)
            self._write_manifest()
            if state is None:
                raise TrainingFailed(
                    "all peers have ended, and none gave its last parameters; the same command "
                    "takes them from their checkpoints"
                )
            return self._finish(state)

    def _start_peers(self) -> None:
        wanted = setup.count_of(self.config)
        of_before = manifest.resumed(self.work.path, self.manifest)
        slots = sorted(of_before)[:wanted]
        slots += manifest.free_slots(slots, wanted - len(slots))
        with self.work.announce(f"starting {wanted} peers"):
            for slot in slots:
                self._start(slot, copy=self.start > 0 and slot not in of_before)
            ends = time.monotonic() + self.config.peers.start_s
            while not self.ended and not any(one["ready"] for one in self._look().values()):
                self._collect()
                if not (self.live or self.ended) or time.monotonic() > ends:
                    raise TrainingFailed(
                        f"no peer has begun to train within peers.start_s "
                        f"({self.config.peers.start_s:g} s): {self.work.path}/{FOLDER}/*/log.txt"
                    )

    def _watch(self, writer: MetricWriter, progress: Progress, signals: Signals) -> None:
        """Watch the peers until all have ended."""
        steps, log_every = self.experiment.steps, self.config.log.every
        eval_every = self.experiment.every["eval.every"]
        logged = evaluated = self.start
        stop_by = math.inf
        last = time.monotonic(), self.step()
        while self.live:
            self._collect()
            self._look()
            now, step = time.monotonic(), min(self.step(), steps)
            if (signals.received is not None or step >= steps) and math.isinf(stop_by):
                stop_by = now + self.config.peers.stop_s
                if signals.received is not None:
                    for one in self.live.values():
                        one.handle.leave.remote("stop")
            trains = any(self._of(slot)["member"] for slot in self.live)
            silent = self._roster_lives() and not trains  # without a roster nobody knows
            if now > stop_by or (stop_by < math.inf and self.ended and silent):
                self._end_the_rest(late=now > stop_by)
            if step >= logged + log_every or (step == steps and step > logged):
                known = self.looked.values()
                row = self.whole.row(known, step, step - last[1], now - last[0])
                row["perf/wall_time_s"] = self._seconds()
                logged, last = step if step == steps else step - step % log_every, (now, step)
                writer.write(step, row)
                live = int(row["peers/live"])
                progress.update(step, shown(row, self.experiment.task.unit, peers=live))
            else:
                progress.update(step)
            if eval_every and evaluated + eval_every <= step < steps:
                evaluated = step - step % eval_every
                self._evaluate([one.handle for one in self.live.values()], step, writer)
            if now > self._saved + _SAVE_S:
                self._resize()
                self._write_manifest()
        self._look()
        self._write_manifest()
        if signals.received is not None:
            of = f"all but {self.unsaved} peers have" if self.unsaved else "every peer has"
            raise Interrupted(
                f"interrupted after step {self.step()}; {of} saved a checkpoint, the same command "
                "resumes",
                signals.received,
            )
        if not self.ended:
            raise TrainingFailed(
                f"no peer is left after step {self.step()}; the same command resumes from their "
                f"checkpoints. See {self.work.path / FOLDER}/*/log.txt"
            )

    def _evaluate(self, handles: list[Any], step: int, writer: MetricWriter) -> Any:
        """Evaluate and save the consensus of these peers' copies, which it returns, if any."""
        state = self.whole.state(handles, self.config.peers.meet_s)
        if state is not None:
            with self.work.announce("evaluating the consensus model", once=True):
                row, model = self.evaluator.row(state)
            loop.evaluate(row, model, step, self.work, writer, self.saver)
            if step not in self.saver.checkpoints.steps():  # of a run that had ended before
                self.saver.save(step, self.whole.consensus(state), self._seconds())
        return state

    def _finish(self, state: TrainState) -> dict[str, Any]:
        self.saver.checkpoints.wait()
        experiment = self.experiment
        held = algorithm.cost(experiment.config, experiment.schedule, self.whole.template, 1)
        sent = 2 * self.whole.message_bytes() / self.config.mix_every
        return loop.conclude(
            experiment,
            self.work,
            self.evaluator,
            state,
            dataclasses.replace(held, sent_a_step=sent),
            self.saver,
            schedule=f"pairs of peers ({self.config.peers.neighbours})",
            schedule_period=None,
            steps=experiment.steps,
            training_seconds=round(self._seconds(), 3),
            peers={
                "slots": {slot: one["steps"] for slot, one in sorted(self.looked.items())},
                "died": self.deaths.total(),
                "meetings": counts_of(self.looked.values()),
            },
        )

    # --- Peers ------------------------------------------------------------------------------------

    def _start(self, slot: int, copy: bool) -> None:
        """Start a peer in the slot; with ``copy`` it joins as a copy of a live one."""
        folder = self.work.path / FOLDER / str(slot)
        before = self._of(slot)
        incarnation = max([before["incarnation"], *events.incarnations(folder)]) + 1
        place = Place(
            self.config.to_dict(),
            str(self.work.path),
            slot,
            incarnation,
            before["steps"] if copy else None,
            self.streams,
            self.step() * self.config.num_replicas,
            os.getcwd(),
        )
        handle = start_actor(Peer, self.config.peers, "SPREAD", _THREADS, place, self.roster)
        self.roster.add.remote(slot, incarnation, handle, copy)
        self.live[slot] = _Live(handle, handle.train.remote())
        self.gone.discard(slot)

    def _collect(self) -> None:
        """Wait a moment for peers that end, and replace those that died."""
        slots = {one.future: slot for slot, one in self.live.items()}
        done, _ = ray.wait(list(slots), timeout=_LOOK_S) if slots else ([], [])
        for future in done:
            slot = slots[future]
            one = self.live.pop(slot)
            self.roster.remove.remote(slot)
            leaves = slot in self.leaving
            self.leaving.discard(slot)
            try:
                result = ray.get(future)
            except RayError as error:
                ray.kill(one.handle)  # it may have failed only to answer, and another comes
                self._died(slot, error, leaves)
                continue
            if result["how"] == "end":
                self.ended.append(one.handle)
            elif result["how"] == "lag":
                ray.kill(one.handle)
                self.work.say(f"peer {slot} has lagged too far behind; {len(self.live)} go on")
                self._replace(slot, leaves)
            elif result["how"] == "leave":
                self.gone.add(slot)
                left = f"peer {slot} has left after {result['steps']} steps; {len(self.live)} go on"
                self.work.say(left)

    def _died(self, slot: int, error: RayError, leaves: bool) -> None:
        self.deaths[slot] += 1
        self.work.say(f"peer {slot} {fate(error)}; {len(self.live)} go on")
        self._replace(slot, leaves or self.deaths[slot] > self.config.peers.restarts)

    def _replace(self, slot: int, leaves: bool) -> None:
        """Start another peer in the place of one that is gone, unless it should leave."""
        self.gone.add(slot)
        may = self.live and self._roster_lives() and self.step() < self.experiment.steps
        if may and not leaves:
            self._start(slot, copy=True)
            self.work.say(f"peer {slot} starts again and joins with a copy of a live peer")

    def _resize(self) -> None:
        """Follow ``decent-jax peers resize``."""
        path = self.work.path / FOLDER / setup.COUNT
        if not path.exists() or not self._roster_lives():
            return
        wanted: Any = None
        with contextlib.suppress(OSError, DataError, LookupError, TypeError):
            wanted = read_json(path)["count"]
        if not is_whole(wanted, 1, setup.MOST):
            if self._first(str(path)):
                self.work.say(f"{path} holds no number of peers; it is ignored")
            return
        path.unlink()
        stay = sorted(self.live.keys() - self.leaving)
        for slot in manifest.free_slots(list(self.live), wanted - len(stay)):
            self.work.say(f"peer {slot} starts and joins with a copy of a live peer")
            self._start(slot, copy=True)
        for slot in stay[wanted:]:
            self.leaving.add(slot)
            self.live[slot].handle.leave.remote("leave")

    def _end_the_rest(self, late: bool) -> None:
        """Kill the peers that still run: too ``late``, or there is nobody to join any more."""
        self.unsaved += len(self.live)
        for slot, one in list(self.live.items()):
            self.work.say(f"peer {slot} {self._why_it_is_ended(slot, late)} and is killed")
            ray.kill(one.handle)
            del self.live[slot]

    def _why_it_is_ended(self, slot: int, late: bool) -> str:
        peers = self.config.peers
        if late:
            return f"did not end within peers.stop_s ({peers.stop_s:g} s)"
        if self._of(slot)["ready"]:
            return f"has been silent for peers.silent_s ({peers.silent_s:g} s)"
        return "had not begun to train when the others ended"

    # --- What is known of all ---------------------------------------------------------------------

    def _look(self) -> dict[int, dict[str, Any]]:
        try:
            looked: Any = ray.get(self.roster.look.remote(), timeout=self.config.peers.silent_s)
            self.looked = looked
        except (GetTimeoutError, ActorUnavailableError):
            pass
        except RayError:
            if self._first("the roster"):
                self.work.say(
                    "the roster is lost: peers go on with the list they have, and estimate the "
                    "common progress; nobody can join any more"
                )
            for slot, one in self.live.items():
                with contextlib.suppress(RayError):
                    report: Any = ray.get(one.handle.report.remote(), timeout=1.0)
                    self.looked[slot] = self._of(slot) | report
        for slot, one in self.looked.items():
            self._say_changes(slot, one)
        if self.config.peers.neighbours == "weighted":
            self._say_links()
        return self.looked

    def _say_links(self) -> None:
        """Once every two of the peers that train have met: how far apart they are."""
        seconds = {
            f"{slot}.{one['incarnation']}": one.get("seconds", {})
            for slot, one in self.looked.items()
            if one["member"]
        }
        words = links(seconds, self.config.algorithm)
        if words and self._first(f"links of {sorted(seconds)}"):
            self.work.say(words)

    def _say_changes(self, slot: int, one: dict[str, Any]) -> None:
        if slot not in self.live:
            return
        name = f"peer {slot}.{one['incarnation']}"
        if one["ready"] and not one["member"] and self._first(f"{name} is silent"):
            self.work.say(f"peer {slot} is silent; the others go on without it")
        if one["member"] and one["incarnation"] and self._first(f"{name} trains"):
            self.work.say(f"peer {slot} trains again, as {slot}.{one['incarnation']}")
        if one["member"] and f"{name} is silent" in self._said:
            self._said.discard(f"{name} is silent")
            self.work.say(f"peer {slot} is back")

    def _first(self, what: str) -> bool:
        new = what not in self._said
        self._said.add(what)
        return new

    def _roster_lives(self) -> bool:
        return "the roster" not in self._said

    def _of(self, slot: int) -> dict[str, Any]:
        """What is known of a slot, see `Roster.look`."""
        nobody = {"incarnation": -1, "steps": 0, "alive": False, "ready": False, "member": False}
        return self.looked.get(slot, {"slot": slot, **nobody})

    def step(self) -> int:
        """Common progress in steps of the run."""
        steps = sum(one["steps"] for one in self.looked.values())
        self._reached = max(self._reached, steps // self.config.num_replicas)
        return self._reached

    def _write_manifest(self) -> None:
        self._saved = time.monotonic()
        best = self.saver.best
        entries = {
            "step": self.step(),
            "examples": self.step() * self.config.batch_size,
            "seconds": self._seconds(),
            "best": best if math.isfinite(best) else None,
            "streams": self.streams,
            "batch": self.config.batch_size // self.config.num_replicas,
            "peers": {
                str(slot): {
                    "steps": one["steps"],
                    "alive": slot not in self.gone and one["incarnation"] >= 0,
                }
                for slot, one in sorted(self.looked.items())
            },
        }
        write_json_atomic(self.work.path / manifest.MANIFEST, entries)

    def _seconds(self) -> float:
        return self.saver.seconds + time.monotonic() - self.began


def _describe(config: ConfigDict, whole: Whole) -> str:
    every = f"{config.mix_every} steps" + (" on average" if config.peers.geometric else "")
    words = (
        f"{config.algorithm} over peers: each asks one of {config.peers.neighbours} others "
        f"after {every} to average copies of {whole.message_bytes() / 1e6:.3g} MB "
        f"({config.peers.wire})"
    )
    if config.algorithm != "swarm":  # its momentum may enlarge the spread for a while
        return words
    names = [f"{k}.0" for k in range(setup.count_of(config))]
    rate = reduction(names, config.peers.neighbours, {})
    return f"{words}; a meeting reduces the spread by at least {rate:.1%}"
