"""The process of ``train.py``: lets the peers train, and shows the run as a whole."""

import dataclasses
import math
import tempfile
import time
from pathlib import Path
from typing import Any

import jax
from ml_collections import ConfigDict

from decent_jax.actors.handles import Actor, Actors
from decent_jax.actors.ray_cluster import check_address, running
from decent_jax.ground.errors import Interrupted, TrainingFailed
from decent_jax.ground.json_files import write_json_atomic
from decent_jax.ground.progress import Progress
from decent_jax.peers import manifest, setup
from decent_jax.peers.crew import Crew
from decent_jax.peers.partners import reduction
from decent_jax.peers.setup import FOLDER, Place
from decent_jax.peers.whole import Whole, counts_of
from decent_jax.train import algorithm, loop
from decent_jax.train.checkpoint import Checkpointer, Saver
from decent_jax.train.evaluation import Evaluator
from decent_jax.train.experiment import Experiment
from decent_jax.train.metrics import MetricWriter, shown
from decent_jax.train.step import TrainState
from decent_jax.train.synchronous import init, time_steps
from decent_jax.train.workdir import Signals, Workdir

_SAVE_S = 2.0


def run(config: ConfigDict, workdir: str | Path) -> dict[str, Any]:
    """Train with peers as ``config`` says, in ``workdir``; resume the run that is there.

    Returns, raises: as `decent_jax.train.run`.
    """
    check_address(config, "peers")
    before = manifest.read(Path(workdir), config)
    with setup.open_run(config, workdir) as (experiment, work):
        work.config = config
        state, count = jax.eval_shape(lambda: init(experiment)), setup.count_of(config)
        copies = count * sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state))
        with running(config, "peers", count, store=copies):
            return Driver(config, experiment, work, before, Actors()).run()


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


class Driver:
    """One session of a run; ``before`` is the manifest of those before it."""

    def __init__(
        self,
        config: ConfigDict,
        experiment: Experiment,
        work: Workdir,
        before: dict[str, Any],
        actors: Actors,
    ):
        self.config, self.experiment, self.work = config, experiment, work
        self.crew = Crew(config, work.path, experiment.steps, before, work.say, actors)
        self.whole = Whole(config, experiment)
        self.evaluator = Evaluator(experiment.config, experiment.task, experiment.placement)
        self._saved = 0.0
        self.start = self.crew.start
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

    def run(self) -> dict[str, Any]:
        """Start the peers, and watch them to the end."""
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
                self._begin()
                self._watch(writer, progress, signals)
                state = self._evaluate(self.crew.ended, steps, writer)
            self._write_manifest()
            if state is None:
                raise TrainingFailed(
                    "all peers have ended, and none gave its last parameters; the same command "
                    "takes them from their checkpoints"
                )
            return self._finish(state)

    def _begin(self) -> None:
        """Start the peers, and wait for the first that trains."""
        crew, seconds = self.crew, self.config.peers.start_s
        with self.work.announce(f"starting {setup.count_of(self.config)} peers"):
            crew.begin()
            ends = time.monotonic() + seconds
            while not crew.ended and not any(one["ready"] for one in crew.look().values()):
                crew.collect()
                if not (crew.live or crew.ended) or time.monotonic() > ends:
                    raise TrainingFailed(
                        f"no peer has begun to train within peers.start_s "
                        f"({seconds:g} s): {self.work.path}/{FOLDER}/*/log.txt"
                    )

    def _watch(self, writer: MetricWriter, progress: Progress, signals: Signals) -> None:
        """Watch the peers until all have ended."""
        crew, steps, log_every = self.crew, self.experiment.steps, self.config.log.every
        eval_every = self.experiment.every["eval.every"]
        logged = evaluated = self.start
        stop_by = math.inf
        last = time.monotonic(), crew.step()
        while crew.live:
            crew.collect()
            crew.look()
            now, step = time.monotonic(), min(crew.step(), steps)
            if (signals.received is not None or step >= steps) and math.isinf(stop_by):
                stop_by = now + self.config.peers.stop_s
                if signals.received is not None:
                    crew.stop()
            if now > stop_by or (stop_by < math.inf and crew.ended and not crew.trains()):
                crew.kill_the_rest(late=now > stop_by)
            if step >= logged + log_every or (step == steps and step > logged):
                row = self.whole.row(crew.looked.values(), step, step - last[1], now - last[0])
                row["perf/wall_time_s"] = self._seconds()
                logged, last = step if step == steps else step - step % log_every, (now, step)
                writer.write(step, row)
                live = int(row["peers/live"])
                progress.update(step, shown(row, self.experiment.task.unit, peers=live))
            else:
                progress.update(step)
            if eval_every and evaluated + eval_every <= step < steps:
                evaluated = step - step % eval_every
                self._evaluate([one.actor for one in crew.live.values()], step, writer)
            if now > self._saved + _SAVE_S:
                crew.resize()
                self._write_manifest()
        crew.look()
        self._write_manifest()
        if signals.received is not None:
            of = f"all but {crew.unsaved} peers have" if crew.unsaved else "every peer has"
            raise Interrupted(
                f"interrupted after step {crew.step()}; {of} saved a checkpoint, the same command "
                "resumes",
                signals.received,
            )
        if not crew.ended:
            raise TrainingFailed(
                f"no peer is left after step {crew.step()}; the same command resumes from their "
                f"checkpoints. See {self.work.path / FOLDER}/*/log.txt"
            )

    def _evaluate(self, actors: list[Actor], step: int, writer: MetricWriter) -> Any:
        """Evaluate and save the consensus of these peers' copies, which it returns, if any."""
        state = self.whole.state(self.crew.copies(actors))
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
                "slots": {slot: one["steps"] for slot, one in sorted(self.crew.looked.items())},
                "died": self.crew.deaths.total(),
                "meetings": counts_of(self.crew.looked.values()),
            },
        )

    def _write_manifest(self) -> None:
        self._saved = time.monotonic()
        best = self.saver.best
        entries = {
            "step": self.crew.step(),
            "examples": self.crew.step() * self.config.batch_size,
            "seconds": self._seconds(),
            "best": best if math.isfinite(best) else None,
            "streams": self.crew.streams,
            "batch": self.config.batch_size // self.config.num_replicas,
            "peers": {
                str(slot): {
                    "steps": one["steps"],
                    "alive": slot not in self.crew.gone and one["incarnation"] >= 0,
                }
                for slot, one in sorted(self.crew.looked.items())
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
