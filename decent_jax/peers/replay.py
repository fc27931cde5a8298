"""Repeat a run of peers from its event logs, in one process, and compare every bit.

    decent-jax peers replay --workdir DIR

Every peer logs what determines its parameters (`decent_jax.peers.events`): the learning rate of
each step, which snapshots it averaged, and when. The replay makes the same steps on the same data,
in any order that the snapshots allow. It compares the checksums of each snapshot and of each peer's
last parameters with the log, and names the first that differs. The exit code is 0 if all are
identical, 1 if some differ, and 2 if there is nothing to replay.
"""

import contextlib
import io
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from decent_jax.data import loader
from decent_jax.ground.errors import RunError
from decent_jax.ground.json_files import Json
from decent_jax.peers import events
from decent_jax.peers.peer_run import FOLDER, MANIFEST, Place, open_peer, read_manifest
from decent_jax.peers.protocol import Format, pull_of, sent_of
from decent_jax.peers.step_boundary import StateChanges, number, on_host
from decent_jax.replicas import TrainState
from decent_jax.train import config as config_lib
from decent_jax.train.experiment import Experiment
from decent_jax.train.step import make_step
from decent_jax.train.stepper import init


class Replayed(NamedTuple):
    """The result of replaying one generation."""

    peer: str  # "rank.generation"
    steps: tuple[int, int]  # the first step, and the one after the last
    averages: int
    versions: int
    differs: str  # the first thing that differs from the log; "" if nothing does
    survived: bool  # whether it logged its end


class Log:
    """The events of a generation, by step."""

    def __init__(self, rank: int, generation: int, lines: Iterator[Json]):
        self.rank, self.name = rank, f"{rank}.{generation}"
        first = next(lines)
        self.start, self.origin = first["start"], first["origin"]
        self.rates: dict[int, int] = {}
        self.averages: dict[int, list[Json]] = defaultdict(list)
        self.versions: dict[int, tuple[int, int]] = {}  # version and checksum
        self.last: int | None = None  # checksum of the last parameters
        self.end, count = self.start, 1
        for line in lines:
            count += 1
            if "rate" in line:
                self.rates[line["t"]] = line["rate"]
            elif "average" in line:
                self.averages[line["t"]].append(line)
            elif "version" in line:
                self.versions[line["t"]] = line["version"], line["crc"]
            if "end" in line:
                self.end, self.last = line["end"], line["crc"]
            else:  # it may have died before the step
                self.end = max(self.end, line["t"] + 1)
        if self.end - self.start > count:
            raise RunError(
                f"the log of peer {self.name} ends after step {self.end} and has only {count} "
                "lines; it is damaged"
            )

    def uses(self, average: Json) -> tuple[tuple[str, int], tuple[str, int]]:
        """The snapshots (peer, version) of an average, this peer's first."""
        return (self.name, average["mine"]), (average["with"], average["theirs"])


def read_logs(workdir: Path) -> list[Log]:
    """The logs of all generations of all peers.

    Raises:
      RunError: there are no logs.
    """
    logs = []
    ranks = [path for path in (workdir / FOLDER).glob("*") if path.name.isdecimal()]
    for folder in sorted(ranks, key=lambda path: int(path.name)):
        for generation in events.generations(folder):
            with contextlib.suppress(StopIteration):  # killed before it wrote a line
                lines = events.read(events.path(folder, generation))
                logs.append(Log(int(folder.name), generation, lines))
    if not logs:
        raise RunError(f"{workdir} holds no run of peers: there is no {FOLDER}/*/events-*.jsonl")
    return logs


def replay(
    workdir: str | Path,
    say: Callable[[str], None] = lambda _: None,
    observe: Callable[[str, int, list[np.ndarray]], None] = lambda *_: None,
) -> list[Replayed]:
    """Replay the run in ``workdir``, which must have ended or been interrupted.

    Args:
      say: callback for one line per peer.
      observe: callback for each snapshot, called with the peer, the step and the arrays.

    Raises:
      RunError: there are no logs, or a peer used a snapshot or state that no log reproduces.
      ConfigError: the run or its data cannot be opened.
    """
    workdir = Path(workdir)
    logs = read_logs(workdir)
    config = config_lib.load_saved(workdir)
    manifest = read_manifest(workdir, config)
    if not manifest:
        raise RunError(f"{workdir} has no {MANIFEST}, which every run of peers has")
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.redirect_stderr(io.StringIO()))  # placement messages
        experiments = {
            rank: stack.enter_context(
                open_peer(Place(config, str(workdir), rank, 0, None, manifest["streams"]))
            )[0]
            for rank in sorted({log.rank for log in logs})
        }
        return _Replay(config, experiments, logs, say, observe).run()


class _Replay:
    def __init__(self, config, experiments: dict[int, Experiment], logs: list[Log], say, observe):
        self.experiments, self.logs, self.say, self.observe = experiments, logs, say, observe
        self.seed, self.form = config.seed, Format(config.codec, config.seed)
        first = next(iter(experiments.values()))
        self.placement, self.changes = first.placement, StateChanges(first)
        self.step = make_step(
            *(first.config, first.task, first.tx, first.rate, first.schedule, first.placement)
        )
        self.snapshots: dict[tuple[str, int], list[np.ndarray]] = {}  # by peer and version
        self.states: dict[tuple[str, int, str], TrainState] = {}  # by peer, step and moment
        origins = [log.origin for log in logs if log.origin]
        self.wanted_states = {(o["peer"], o["t"], o["when"]) for o in origins}
        self.uses = Counter(  # uses left of each snapshot, which is dropped after its last use
            use
            for log in logs
            for averages in log.averages.values()
            for average in averages
            for use in log.uses(average)
        )
        self.done: list[Replayed] = []

    def run(self) -> list[Replayed]:
        peers = {log.name: self._replay(log) for log in self.logs}
        needs = {name: next(peer, None) for name, peer in peers.items()}  # None: it has ended
        while waiting := {name: need for name, need in needs.items() if need}:
            ready = [
                k for k, need in waiting.items() if need in self.snapshots or need in self.states
            ]
            if not ready:
                name, need = next(iter(waiting.items()))
                raise RunError(f"peer {name} used {need}, which no log reproduces")
            needs |= {name: next(peers[name], None) for name in ready}
        return sorted(self.done, key=lambda log: tuple(map(int, log.peer.split("."))))

    def _replay(self, log: Log) -> Iterator[tuple]:
        """Replay one generation; yields the key of each snapshot or state that it waits for."""
        experiment, changes = self.experiments[log.rank], self.changes
        if log.origin:
            need = (log.origin["peer"], log.origin["t"], log.origin["when"])
            yield need
            state = changes.copy(self.states[need])
        else:
            state = init(experiment)
        differs, count = "", 0
        with loader.train_batches(
            experiment.task.train_source,
            seed=self.seed,
            num_replicas=1,
            batch_size=experiment.config.batch_size,
            start_step=log.start,
            prefetch=0,
        ) as batches:
            for t in range(log.start, log.end):
                self._keep(log, t, "checkpoint", state)
                for average in log.averages.get(t, ()):
                    yield from log.uses(average)
                    mine = self.snapshots[log.name, average["mine"]]
                    state = changes.average(state, mine, self._pull(log, average))
                    count += 1
                if t in log.versions:
                    version, crc = log.versions[t]
                    arrays = on_host(changes.copy(changes.averaged(state)))
                    if events.crc(arrays) != crc and not differs:
                        differs = f"version {version}, published before step {t}"
                    self.observe(log.name, t, arrays)
                    if self.uses[log.name, version]:
                        self.snapshots[log.name, version] = arrays
                self._keep(log, t, "boundary", state)
                if t in log.rates:
                    state = self._step(state, next(batches), log, t)
        self._keep(log, log.end, "checkpoint", state)
        arrays = on_host(changes.averaged(state))
        if log.last is not None and events.crc(arrays) != log.last and not differs:
            differs = f"the last parameters, after step {log.end}"
        steps, survived = (log.start, log.end), log.last is not None
        self.done.append(Replayed(log.name, steps, count, len(log.versions), differs, survived))
        self.say(_line(self.done[-1]))

    def _pull(self, log: Log, average: Json) -> list[np.ndarray]:
        sent = []
        for (peer, version), side in zip(log.uses(average), average["sides"], strict=True):
            sent.append(sent_of(self.form, peer, version, self.snapshots[peer, version], side))
            self.uses[peer, version] -= 1
            if not self.uses[peer, version]:
                del self.snapshots[peer, version]
        return pull_of(*sent)

    def _keep(self, log: Log, t: int, when: str, state: TrainState) -> None:
        if (log.name, t, when) in self.wanted_states:
            self.states[log.name, t, when] = self.changes.copy(state)

    def _step(self, state: TrainState, block: object, log: Log, t: int) -> TrainState:
        state = self.changes.at_progress(state, log.rates[t])
        batch = self.placement.put(block)
        return self.step(state, batch, number(log.rank, t), round=0)[0]


def _line(peer: Replayed) -> str:
    words = f"differs: {peer.differs}" if peer.differs else "identical"
    end = "" if peer.survived else " (died, or lagged)"
    first, last = peer.steps
    return (
        f"peer {peer.peer}: steps {first} to {last}, {peer.averages} pairwise averages, "
        f"{peer.versions} snapshots{end}: {words}"
    )
