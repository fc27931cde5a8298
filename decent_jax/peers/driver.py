"""The process of ``train.py``: runs the peers, and evaluates and reports their consensus."""

import contextlib
import dataclasses
import math
import tempfile
import time
from collections.abc import Collection
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from decent_jax import replicas
from decent_jax.actors.handles import Actor, Actors, own_host
from decent_jax.actors.ray_cluster import check_address, check_memory, running
from decent_jax.checkpoints.on_disk import Checkpointer
from decent_jax.ground import connections
from decent_jax.ground.errors import ConfigError, Interrupted, TrainingFailed
from decent_jax.ground.json_files import Json, write_json_atomic
from decent_jax.ground.progress import Progress
from decent_jax.ground.pytree import PyTree
from decent_jax.monitor.goodput import Clock
from decent_jax.monitor.metrics_file import MetricWriter
from decent_jax.peers import Config, peer_run
from decent_jax.peers.peer_run import FOLDER, Place
from decent_jax.peers.protocol import Arrays, Format
from decent_jax.peers.step_boundary import averaged, number
from decent_jax.peers.supervisor import Supervisor
from decent_jax.replicas import TrainState
from decent_jax.train import algorithm, conclusion
from decent_jax.train.evaluation import Evaluator
from decent_jax.train.experiment import Experiment, bytes_ahead
from decent_jax.train.rows import shown
from decent_jax.train.same_data import facts_of
from decent_jax.train.saver import Saver
from decent_jax.train.signals import Halted, Signals
from decent_jax.train.stepper import Feed, Programs, init, shapes_of
from decent_jax.train.synchronous import time_steps
from decent_jax.train.workdir import Workdir

_SAVE_S = 2.0


def run(config: Config, workdir: str | Path) -> Json:
    """Train with peers in ``workdir``, or resume the run that is already there.

    Returns and raises the same as `decent_jax.train.run`.
    """
    check_address(config.ray)
    before = peer_run.read_manifest(Path(workdir), config)
    with peer_run.open_run(config, workdir) as (experiment, work):
        work.record.config = config
        state, count = jax.eval_shape(lambda: init(experiment)), peer_run.count_of(config)
        size = algorithm.bytes_of(state)
        need = size + bytes_ahead(config, experiment.task.train_source, config.num_replicas)
        if not config.ray.address:
            check_memory(count * [need])
            compile_step(config, experiment, work)
        with running(config.ray, count * [need], store=count * size):
            driver = Driver(config, experiment, work, before, Actors(), own_host(), need)
            return driver.run()


def compile_step(config: Config, experiment: Experiment, work: Workdir) -> None:
    """Compile a peer's step, which the peers of this machine then find in jax's cache.

    Raises:
      ConfigError: compiling takes longer than ``peers.start_s``.
    """
    peer = peer_run.of_peer(experiment, config, 0, config.num_replicas)
    clock, state = Clock(), init(peer)
    cost = algorithm.cost(peer.config, peer.schedule, state, 1)
    with Programs(peer, work, clock, cost, number(0, 0)) as programs:
        with Feed(peer, 0, clock) as feed:
            batch, _ = feed.next()
        programs.compile(state, batch, programs.blocks.due(0)[0], shapes_of(batch))
    took, start_s = clock.spent()["compiling"], config.peers.start_s
    if took > start_s:
        wanted = f"must be longer than it takes to compile a step, {took:.3g} s here"
        raise ConfigError.about("peers.start_s", start_s, wanted)


def dry_run(config: Config) -> None:
    """Time the step of one peer on this machine, without averages, for which no step waits.

    Raises:
      ConfigError: the run would be refused.
    """
    check_address(config.ray)
    with tempfile.TemporaryDirectory() as folder:
        place = Place(config, folder, 0, 0, None, config.num_replicas)
        with peer_run.open_peer(place) as (experiment, work):
            work.console.say(_describe(config, Aggregate(config, experiment)))
            time_steps(experiment, work, experiment.steps // config.num_replicas)


class Aggregate:
    """Computes metrics and the consensus model from the reports and snapshots of all peers.

    Args:
      config: the run's config.
      experiment: the run of one replica, on this process's devices.
    """

    def __init__(self, config: Config, experiment: Experiment):
        self._config, self._experiment = config, experiment
        self.template = init(experiment)

        def mean(tree):
            consensus = replicas.consensus_mean(tree)
            return experiment.placement.place_all(replicas.broadcast(consensus, 1))

        self._mean = jax.jit(mean)
        # Sum and number of the losses of each peer (rank, generation), at the last row.
        self._losses: dict[tuple[int, int], tuple[float, int]] = {}

    def message_bytes(self) -> int:
        """Bytes of one snapshot in the format in which peers send it."""
        snapshot = averaged(self._experiment.task.mixes_state, self.template)
        return message_bytes(self._config.codec, snapshot)

    def sent_per_step(self) -> float:
        """Bytes that a peer sends per step: it asks and is asked once per ``mix_every`` steps."""
        return 2 * self.message_bytes() / self._config.mix_every

    def row(
        self, peers: Collection[Json], step: int, steps: int, seconds: float
    ) -> dict[str, float]:
        """The metrics at ``step``, ``steps`` steps and ``seconds`` after the previous row.

        As in any other run, ``train/loss`` is the mean over the steps since that row.

        Args:
          peers: values of `Membership.status`; except for the losses, only live peers count, if
            there are any.
        """
        task, config = self._experiment.task, self._config
        reported = [peer for peer in peers if "averaged" in peer]
        peers = [peer for peer in reported if peer["alive"]] or reported
        total, count, means = 0.0, 0, []
        for peer in reported:
            now, name = peer.get("losses", (0.0, 0)), (peer["rank"], peer["generation"])
            before = self._losses.get(name, (0.0, 0))
            self._losses[name] = now
            if now[1] > before[1]:
                losses, number = now[0] - before[0], now[1] - before[1]
                total, count, means = total + losses, count + number, [*means, losses / number]
        means = means or [np.nan]
        squares = [peer["distance"] ** 2 for peer in peers if peer.get("distance")]
        n = max(len(peers), 1)
        # For two random peers, E ||x_i - x_j||^2 = 2 n / (n - 1) mean_i ||x_i - mean||^2.
        spread = float(np.sqrt(np.mean(squares) * (n - 1) / (2 * n))) if squares else 0.0
        examples = steps * config.batch_size
        return {
            "train/loss": total / count if count else np.nan,
            "train/loss_max": float(np.max(means)),
            "train/loss_min": float(np.min(means)),
            "train/learning_rate": float(np.asarray(self._experiment.rate(step))),
            "train/consensus_distance_relative": spread,
            "perf/step_time_s": seconds / max(steps, 1),
            f"perf/{task.unit}_per_s": examples * task.units_per_example / max(seconds, 1e-9),
            "peers/live": float(len(peers)),
            **{f"peers/{name}": float(count) for name, count in counts_of(peers).items()},
            **{
                f"peers/{peer['rank']}/{name}": float(peer.get(name, 0))
                for peer in peers
                for name in ("steps", "generation", "stale")
            },
        }

    def state(self, snapshots: list[Arrays]) -> TrainState | None:
        """The peers' snapshots as a stacked state, (m, ...); None if there are none."""
        if not snapshots:
            return None
        template, mixes = self.template, self._experiment.task.mixes_state
        like = averaged(mixes, template)
        stacked = [jnp.asarray(np.stack(leaves)) for leaves in zip(*snapshots, strict=True)]
        params, model_state = jax.tree.unflatten(jax.tree.structure(like), stacked)
        if not mixes:
            model_state = replicas.take(template.model_state, 0)
            model_state = replicas.broadcast(model_state, len(snapshots))
        return template._replace(params=params, model_state=model_state)

    def consensus(self, state: TrainState) -> TrainState:
        """The mean of stacked snapshots as the state of one replica, for a checkpoint."""
        params, model_state = self._mean((state.params, state.model_state))
        return self.template._replace(params=params, model_state=model_state)


def message_bytes(codec: str, snapshot: PyTree) -> int:
    """Bytes of a snapshot (1, ...) in a format."""
    return Format(codec).bytes_sent([x.shape[1:] for x in jax.tree.leaves(snapshot)])


def counts_of(peers: Collection[Json]) -> dict[str, int]:
    """The number of attempts to average by outcome, see `Averager.counts`."""
    names = ("averaged", "declined", "undecoded", "lost")
    return {name: sum(peer.get(name, 0) for peer in peers) for name in names}


class Driver:
    """One session of a run of peers.

    Args:
      config: the run's config.
      experiment: the run of one replica, on this process's devices.
      work: the run directory.
      before: the manifest from earlier sessions.
      actors: the `Actors` that start the peers.
      host: IP address at which this process listens.
      need: bytes that the arrays of one peer take.
    """

    def __init__(
        self,
        config: Config,
        experiment: Experiment,
        work: Workdir,
        before: Json,
        actors: Actors,
        host: str,
        need: float = 0.0,
    ):
        self.config, self.experiment, self.work, self.host = config, experiment, work, host
        self._data = facts_of(config, experiment.task)
        self.peers = Supervisor(
            *(config, work.path, experiment.steps, before, work.record.incident, actors),
            data=self._data,
            need=need,
        )
        self.aggregate = Aggregate(config, experiment)
        self.evaluator = Evaluator(experiment.config, experiment.task, experiment.placement)
        self._saved = 0.0
        self.start = self.peers.start
        peer_run.forget(work.path, self.start + 1)
        self.saver = Saver(experiment, Checkpointer(work.path, config.checkpoint.keep))
        self.saver.restored(
            {
                "seconds": before.get("seconds", 0.0),
                "best": before.get("best") or math.inf,
                "examples": self.start * config.batch_size,
                "step": self.start,
                "data": before.get("data", self._data),
            }
        )
        self.began = time.monotonic()

    def run(self) -> Json:
        """Start the peers and watch them until they end; returns the summary."""
        work, steps = self.work, self.experiment.steps
        work.record.write_config()
        sent = {"bytes_sent_per_step": self.aggregate.sent_per_step()}
        work.record.write_start(steps, self.experiment.task.unit, (), sent)
        if self.start:
            work.console.say(f"resuming after step {self.start} of common progress")
        work.console.say(_describe(self.config, self.aggregate))
        peers = self.peers
        listener, address = connections.listen(self.host, peers.secret, peers.membership.serve)
        with self.saver:
            with (
                work.record.open_metrics(self.start) as writer,
                work.console.show_progress(steps, self.start) as progress,
                Signals() as signals,
                listener,
            ):
                self.evaluator.pause = lambda: _halt_after(signals)
                self._begin(address)
                self._watch(writer, progress, signals)
                try:
                    state = self._evaluate(self.peers.ended, steps, writer)
                except Halted:
                    self._stop_if_told(signals)
                    raise
            self._write_manifest()
            if state is None:
                raise TrainingFailed(
                    "all peers have ended, and none sent its last parameters; the same command "
                    "restores them from their checkpoints"
                )
            return self._finish(state)

    def _begin(self, address: connections.Address) -> None:
        """Start the peers, and wait until the first of them trains."""
        peers, seconds = self.peers, self.config.peers.start_s
        logs = f"{self.work.path}/{FOLDER}/*/log.txt"
        with self.work.console.announce(f"starting {peer_run.count_of(self.config)} peers"):
            peers.begin(address)
            ends = time.monotonic() + seconds
            while not peers.ended and not any(peer["ready"] for peer in peers.refresh().values()):
                peers.collect()
                if not (peers.live or peers.ended):
                    raise TrainingFailed(f"all peers ended before any of them trained: see {logs}")
                if time.monotonic() > ends:
                    raise TrainingFailed(
                        f"no peer has begun to train within peers.start_s ({seconds:g} s); "
                        f"increase it if peers still compile: see {logs}"
                    )

    def _watch(self, writer: MetricWriter, progress: Progress, signals: Signals) -> None:
        """Log, evaluate and resize until all peers have ended."""
        peers, steps, log_every = self.peers, self.experiment.steps, self.config.log.every
        eval_every = self.experiment.every["eval.every"]
        logged = evaluated = self.start
        stop_by = math.inf
        last = time.monotonic(), peers.step()
        while peers.live:
            peers.collect()
            peers.refresh()
            now, step = time.monotonic(), min(peers.step(), steps)
            if (signals.received is not None or step >= steps) and math.isinf(stop_by):
                stop_by = now + self.config.peers.patience_s
                if signals.received is not None:
                    peers.stop()
            if now > stop_by or (stop_by < math.inf and peers.ended and not peers.trains()):
                peers.kill_the_rest(late=now > stop_by)
            if step >= logged + log_every or (step == steps and step > logged):
                row = self.aggregate.row(peers.status.values(), step, step - last[1], now - last[0])
                row["perf/wall_time_s"] = self._seconds()
                logged, last = step if step == steps else step - step % log_every, (now, step)
                writer.write(step, row)
                live = int(row["peers/live"])
                progress.update(step, shown(row, self.experiment.task.unit, peers=live))
            else:
                progress.update(step)
            if eval_every and evaluated + eval_every <= step < steps:
                evaluated = step - step % eval_every
                with contextlib.suppress(Halted):
                    self._evaluate([peer.actor for peer in peers.live.values()], step, writer)
            if now > self._saved + _SAVE_S:
                peers.resize()
                self._write_manifest()
        peers.refresh()
        self._write_manifest()
        self._stop_if_told(signals)
        if not peers.ended:
            raise TrainingFailed(
                f"no peer is left after step {peers.step()}; the same command resumes from their "
                f"checkpoints. See {self.work.path / FOLDER}/*/log.txt"
            )

    def _stop_if_told(self, signals: Signals) -> None:
        """Raise Interrupted if a signal has arrived, once the peers have ended."""
        if signals.received is not None:
            unsaved, step = self.peers.unsaved, self.peers.step()
            of = f"all but {unsaved} peers have" if unsaved else "every peer has"
            words = (
                f"interrupted after step {step}; {of} saved a checkpoint, the same command resumes"
            )
            raise Interrupted(words, signals.received)

    def _evaluate(self, actors: list[Actor], step: int, writer: MetricWriter) -> PyTree:
        """Evaluate and save the consensus model of these peers; returns their stacked state."""
        state = self.aggregate.state(self.peers.snapshots(actors))
        if state is not None:
            with self.work.console.announce("evaluating the consensus model", once=True):
                row, model = self.evaluator.row(state)
            self.saver.evaluation(step, row, model, writer, self.work.console)
            if step not in self.saver.checkpoints.steps():  # unless the run had already ended
                self.saver.save(step, self.aggregate.consensus(state), self._seconds())
        return state

    def _finish(self, state: TrainState) -> Json:
        self.saver.checkpoints.wait()
        experiment = self.experiment
        held = algorithm.cost(experiment.config, experiment.schedule, self.aggregate.template, 1)
        return conclusion.conclude(
            experiment,
            self.work,
            self.evaluator,
            state,
            dataclasses.replace(held, sent_a_step=self.aggregate.sent_per_step()),
            self.saver,
            schedule="random pairs of peers",
            schedule_period=None,
            steps=experiment.steps,
            training_seconds=round(self._seconds(), 3),
            peers={
                "ranks": {rank: peer["steps"] for rank, peer in sorted(self.peers.status.items())},
                "died": self.peers.deaths.total(),
                "averages": counts_of(self.peers.status.values()),
            },
        )

    def _write_manifest(self) -> None:
        self._saved = time.monotonic()
        best = self.saver.best
        entries = {
            "step": self.peers.step(),
            "examples": self.peers.step() * self.config.batch_size,
            "seconds": self._seconds(),
            "best": best if math.isfinite(best) else None,
            "streams": self.peers.streams,
            "data": self._data,
            "batch": self.config.batch_size // self.config.num_replicas,
            "peers": {
                str(rank): {
                    "steps": peer["steps"],
                    "alive": rank not in self.peers.gone and peer["generation"] >= 0,
                }
                for rank, peer in sorted(self.peers.status.items())
            },
        }
        write_json_atomic(self.work.path / peer_run.MANIFEST, entries)

    def _seconds(self) -> float:
        return self.saver.seconds + time.monotonic() - self.began


def _halt_after(signals: Signals) -> None:
    if signals.received is not None:
        raise Halted


def _describe(config: Config, aggregate: Aggregate) -> str:
    return (
        f"{config.algorithm} over peers: every {config.mix_every} steps, each asks another one "
        f"at random to average {aggregate.message_bytes() / 1e6:.3g} MB ({config.codec})"
    )
