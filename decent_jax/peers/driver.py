"""The process of ``train.py``: starts the peers, watches them, and shows the run as a whole."""

import contextlib
import dataclasses
import os
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
import ray
from ml_collections import ConfigDict
from ray.exceptions import GetTimeoutError, RayActorError, RayError

from decent_jax.errors import Interrupted, TrainingFailed
from decent_jax.json_files import read_json
from decent_jax.peers import events, manifest, resize, setup
from decent_jax.peers.formats import Format
from decent_jax.peers.partners import links, reduction
from decent_jax.peers.peer import Peer
from decent_jax.peers.roster import Roster
from decent_jax.peers.setup import FOLDER, Place
from decent_jax.peers.start import check_address, ray_of
from decent_jax.peers.whole import Whole
from decent_jax.train import algorithm, loop
from decent_jax.train.bar import Progress
from decent_jax.train.evaluation import Evaluator
from decent_jax.train.finish import finish
from decent_jax.train.saver import Saver
from decent_jax.train.setup import Experiment
from decent_jax.train.step import TrainState
from decent_jax.train.workdir import Signals, Workdir

COUNT = "count.json"
_LOOK_S, _SAVE_S = 0.2, 2.0


def run(config: ConfigDict, workdir: str | Path) -> dict[str, Any]:
    """Train with peers as ``config`` says, in ``workdir``; resume the run that is there.

    Returns, raises: as `decent_jax.train.run`.
    """
    setup.check(config)
    check_address("peers", config.peers.address)
    before = manifest.read(Path(workdir), config)
    with setup.open_run(config, workdir) as (experiment, work):
        work.config = config
        with ray_of(config, experiment):
            return _Driver(config, experiment, work, before).run()


class _Live:
    """A peer that the driver has started."""

    def __init__(self, place: Place, handle: Any):
        self.place, self.handle = place, handle
        self.future = handle.train.remote()


class _Driver:
    """One session of a run; ``before`` is the manifest of those before it."""

    def __init__(
        self, config: ConfigDict, experiment: Experiment, work: Workdir, before: dict[str, Any]
    ):
        self.config, self.experiment, self.work = config, experiment, work
        self.per_step = config.num_replicas  # steps of peers that are one step of the run
        self.live: dict[int, _Live] = {}
        self.restarts: dict[int, int] = {}
        self.ended: list[Any] = []  # handles of peers at the end of the run
        self.looked: dict[int, dict[str, Any]] = {}
        self.manifest = before
        self.known = manifest.known_steps(work.path, self.manifest)
        self.gone: set[int] = set()  # slots whose peers died or left, and were not replaced
        self._reached = 0
        self.roster: Any = None
        self.whole = Whole(config, experiment)
        self._saved = 0.0
        self._said: set[str] = set()

    # --- The run ----------------------------------------------------------------------------------

    def run(self) -> dict[str, Any]:
        config, experiment, work = self.config, self.experiment, self.work
        start = min(self.step(), experiment.steps)
        work.write_config()
        if start:
            work.say(f"resuming after step {start} of all peers together")
        work.say(self._describe())
        evaluator = Evaluator(experiment.config, experiment.task, experiment.placement)
        roster = ray.remote(Roster).options(num_cpus=0, max_concurrency=1)
        self.roster = roster.remote(config.peers.silent_s, self.known)
        setup.forget(work.path, start + 1)
        with Saver(experiment, work.path) as saver:
            saver.restored(
                {
                    "seconds": self.manifest.get("seconds", 0.0),
                    "best": self.manifest.get("best") or float("inf"),
                    "examples": start * config.batch_size,
                    "step": start,
                }
            )
            self.seconds_before, self.began = saver.seconds, time.monotonic()
            with (
                work.open_metrics(start) as writer,
                work.show_progress(experiment.steps, start) as progress,
                Signals() as signals,
            ):
                self._start_peers(start)
                self._watch(evaluator, saver, writer, progress, signals, start)
                steps = experiment.steps
                state = self._state(self.ended)
                loop.evaluate(evaluator, state, steps, work, writer, saver)
                if steps not in saver.checkpoints.steps():  # a run that had ended before
                    saver.save(steps, self.whole.consensus(state), self._seconds())
            self._write_manifest(saver)
            return self._finish(evaluator, saver, state, steps)

    def _start_peers(self, start: int) -> None:
        wanted = setup.count_of(self.config)
        entries = self.manifest.get("peers", {})
        of_before = [int(k) for k, v in entries.items() if v["alive"] and self._has_saved(k)]
        slots = sorted(of_before)[:wanted]
        slots += manifest.free_slots(slots, wanted - len(slots))
        with self.work.announce(f"starting {wanted} peers"):
            for slot in slots:
                self._start(slot, copy=bool(start) and slot not in of_before)
            ends = time.monotonic() + self.config.peers.start_s
            while not self.ended and not any(one.get("ready") for one in self._look().values()):
                self._collect(_LOOK_S)
                if not (self.live or self.ended) or time.monotonic() > ends:
                    raise TrainingFailed(
                        f"no peer has begun to train within peers.start_s "
                        f"({self.config.peers.start_s:g} s): {self.work.path}/{FOLDER}/*/log.txt"
                    )

    def _has_saved(self, slot: str) -> bool:
        return bool(manifest.saved_steps(self.work.path / FOLDER / slot))

    def _watch(self, evaluator, saver, writer, progress: Progress, signals, start: int) -> None:
        """Until all peers have ended."""
        log_every, eval_every = self.config.log.every, self.experiment.every["eval.every"]
        logged, evaluated = start, start
        stopping: float | None = None
        last = time.monotonic(), self.step()
        while self.live:
            self._collect(_LOOK_S)
            self._look()
            step = min(self.step(), self.experiment.steps)
            if signals.received is not None and stopping is None:
                stopping = time.monotonic() + self.config.peers.stop_s
                for one in self.live.values():
                    one.handle.leave.remote("stop")
            if step >= self.experiment.steps and stopping is None:
                stopping = time.monotonic() + self.config.peers.stop_s
            silent = not any(self.looked.get(slot, {}).get("member") for slot in self.live)
            if stopping is not None and (time.monotonic() > stopping or (self.ended and silent)):
                self._end_the_rest()
            if step >= logged + log_every or (step == self.experiment.steps and step > logged):
                now = time.monotonic(), step
                known = [one for one in self.looked.values() if "met" in one]
                alive = [one for one in known if one["alive"]]
                row = self.whole.row(alive or known, step, now[1] - last[1], now[0] - last[0])
                row["perf/wall_time_s"] = self._seconds()
                logged = step if step == self.experiment.steps else step - step % log_every
                last = now
                writer.write(step, row)
                progress.update(step, self.whole.shown(row))
            else:
                progress.update(step)
            if eval_every and step >= evaluated + eval_every and step < self.experiment.steps:
                evaluated = step - step % eval_every
                state = self._state([one.handle for one in self.live.values()])
                if state is not None:
                    loop.evaluate(evaluator, state, step, self.work, writer, saver)
                    saver.save(step, self.whole.consensus(state), self._seconds())
            if time.monotonic() > self._saved + _SAVE_S:
                self._resize()
                self._write_manifest(saver)
        self._look()
        if signals.received is not None:
            self._write_manifest(saver)
            raise Interrupted(
                f"interrupted after step {self.step()}; every peer has saved a checkpoint, the "
                "same command resumes",
                signals.received,
            )
        if not self.ended:
            self._write_manifest(saver)
            raise TrainingFailed(
                f"no peer is left after step {self.step()}; the same command resumes from their "
                f"checkpoints. See {self.work.path / FOLDER}/*/log.txt"
            )

    def _finish(self, evaluator, saver: Saver, state: TrainState, steps: int) -> dict[str, Any]:
        saver.checkpoints.wait()
        held = algorithm.cost(
            self.experiment.config, self.experiment.schedule, self.whole.template, 1
        )
        sent = 2 * self._message_bytes() / self.config.mix_every
        counts = {
            name: sum(one.get(name, 0) for one in self.looked.values())
            for name in ("met", "declined", "not_understood", "lost")
        }
        return finish(
            *(
                self.experiment,
                self.work,
                evaluator,
                state,
                dataclasses.replace(held, sent_a_step=sent),
            ),
            steps=steps,
            final=saver.evaluated,
            best_eval_loss=saver.best,
            training_seconds=round(self._seconds(), 3),
            peers={
                "slots": {slot: one["steps"] for slot, one in sorted(self.looked.items())},
                "died": sum(self.restarts.values()),
                "meetings": counts,
            },
        )

    # --- Peers ------------------------------------------------------------------------------------

    def _start(self, slot: int, copy: bool) -> None:
        """Start a peer in the slot; with ``copy`` it joins as a copy of a live one."""
        folder = self.work.path / FOLDER / str(slot)
        incarnation = max([-1, *events.incarnations(folder)]) + 1
        incarnation = max(incarnation, self.looked.get(slot, {}).get("incarnation", -1) + 1)
        steps = max(self.known.get(slot, 0), self.looked.get(slot, {}).get("steps", 0))
        place = Place(
            self.config.to_dict(),
            str(self.work.path),
            slot,
            incarnation,
            steps if copy else None,
            self.manifest.get("streams", self.config.num_replicas),
            self.step() * self.per_step,
            os.getcwd(),
        )
        peers = self.config.peers
        actor = ray.remote(Peer).options(
            num_cpus=peers.cpus,
            num_gpus=peers.gpus,
            max_concurrency=32,
            scheduling_strategy="SPREAD",
        )
        handle = actor.remote(place, self.roster)
        self.roster.add.remote(slot, incarnation, handle)
        self.live[slot] = _Live(place, handle)
        self.gone.discard(slot)

    def _collect(self, seconds: float) -> None:
        """Wait for peers that end, and replace those that died."""
        futures = {one.future: slot for slot, one in self.live.items()}
        done, _ = ray.wait(list(futures), timeout=seconds) if futures else ([], [])
        for future in done:
            slot = futures[future]
            one = self.live.pop(slot)
            incarnation = self.looked.get(slot, {}).get("incarnation", one.place.incarnation)
            self.roster.remove.remote(slot, incarnation)
            try:
                result = ray.get(future)
            except RayError as error:
                self._died(slot, error)
                continue
            if result["how"] == "end":
                self.ended.append(one.handle)
            elif result["how"] == "leave":
                self.gone.add(slot)
                left = f"peer {slot} has left after {result['steps']} steps; {len(self.live)} go on"
                self.work.say(left)

    def _died(self, slot: int, error: RayError) -> None:
        why = "was killed" if isinstance(error, RayActorError) else _cause(error)
        count = self.restarts[slot] = self.restarts.get(slot, 0) + 1
        self.work.say(f"peer {slot} {why}; {len(self.live)} go on")
        self.gone.add(slot)
        if count > self.config.peers.restarts or not self.live:
            return
        if self.step() < self.experiment.steps and self._roster_lives():
            self._start(slot, copy=True)
            self.work.say(f"peer {slot} starts again and joins with a copy of a live peer")

    def _resize(self) -> None:
        """Follow ``decent-jax peers resize``."""
        path = self.work.path / FOLDER / COUNT
        if not path.exists() or not self._roster_lives():
            return
        try:
            wanted = read_json(path)["count"]
            if type(wanted) is not int or not 1 <= wanted <= resize.MOST:
                raise ValueError
        except (OSError, ValueError, LookupError, TypeError):
            if self._first(str(path)):
                self.work.say(f"{path} holds no number of peers; it is ignored")
            return
        path.unlink()
        missing = wanted - len(self.live)
        for slot in manifest.free_slots(list(self.live), missing):
            self.work.say(f"peer {slot} starts and joins with a copy of a live peer")
            self._start(slot, copy=True)
        for slot in sorted(self.live)[wanted:] if missing < 0 else []:
            self.live[slot].handle.leave.remote("leave")

    def _end_the_rest(self) -> None:
        for slot, one in list(self.live.items()):
            self.work.say(f"peer {slot} did not end within peers.stop_s and is killed")
            ray.kill(one.handle)
            del self.live[slot]

    # --- What is known of all ---------------------------------------------------------------------

    def _look(self) -> dict[int, dict[str, Any]]:
        try:
            self.looked = ray.get(self.roster.look.remote(), timeout=self.config.peers.silent_s)
        except GetTimeoutError:
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
                    self.looked[slot] = self.looked.get(slot, {}) | report
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
        words = links(seconds)
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

    def step(self) -> int:
        """Common progress in steps of the run."""
        steps = self.known | {slot: one["steps"] for slot, one in self.looked.items()}
        self._reached = max(self._reached, sum(steps.values()) // self.per_step)
        return self._reached

    def _state(self, handles: list[Any]) -> Any:
        return self.whole.state(handles, self.config.peers.meet_s)

    # --- Files ------------------------------------------------------------------------------------

    def _write_manifest(self, saver: Saver) -> None:
        self._saved = time.monotonic()
        slots = {slot: {"steps": steps, "alive": False} for slot, steps in self.known.items()}
        for slot, one in self.looked.items():
            alive = slot not in self.gone and one["incarnation"] >= 0
            slots[slot] = {"steps": one["steps"], "alive": alive}
        manifest.write(
            self.work.path,
            step=self.step(),
            examples=self.step() * self.config.batch_size,
            seconds=self._seconds(),
            best=saver.best if np.isfinite(saver.best) else None,
            streams=self.manifest.get("streams", self.config.num_replicas),
            batch=self.config.batch_size // self.config.num_replicas,
            peers={str(slot): slots[slot] for slot in sorted(slots)},
        )

    def _seconds(self) -> float:
        return self.seconds_before + time.monotonic() - self.began

    def _message_bytes(self) -> int:
        leaves = jax.tree.leaves(self.whole.template.params)
        form = Format(self.config.peers.wire)
        return form.bytes_sent([x.shape[1:] for x in leaves])

    def _describe(self) -> str:
        config = self.config
        every = f"{config.mix_every} steps" + (" on average" if config.peers.geometric else "")
        names = [f"{k}.0" for k in range(setup.count_of(config))]
        rate = reduction(names, config.peers.neighbours, {})
        words = (
            f"{config.algorithm} over peers: each asks one of {config.peers.neighbours} others "
            f"after {every} to average copies of {self._message_bytes() / 1e6:.3g} MB "
            f"({config.peers.wire})"
        )
        if config.algorithm != "swarm":  # its momentum may enlarge the spread for a while
            return words
        return f"{words}; a meeting reduces the spread by {rate:.1%} at least"


def _cause(error: RayError) -> str:
    cause = getattr(error, "cause", None) or error
    first = str(cause).partition("\n")[0]
    return f"failed ({type(cause).__name__}: {first})"
