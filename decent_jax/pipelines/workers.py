"""All workers of the grid: starts, calls and watches them, and keeps their checkpoints."""

import secrets
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from decent_jax.actors.handles import Actors, Call, Lost, Node, Silent, Unanswered
from decent_jax.actors.ray_cluster import reserved
from decent_jax.checkpoints import on_disk as folders
from decent_jax.checkpoints.arrays import STAGE
from decent_jax.checkpoints.on_disk import BEST, FOLDER
from decent_jax.ground.errors import CheckpointError, ConfigError, TrainingFailed
from decent_jax.ground.json_files import Json
from decent_jax.pipelines import Config
from decent_jax.pipelines.worker import Worker, WorkerSpec
from decent_jax.plan.plan_file import Plan

_LOOK_S = 0.5
_NOTICED_S = 2.0  # for Ray to notice that an actor is dead
_THREADS = 4  # of an actor: heartbeats, training, writing


class Workers:
    """The actors of a grid; leaving the context kills all of them.

    Attributes:
      specs: position and run of each worker, replica by replica; all results are in this order.

    Args:
      config: the run's config.
      workdir: the run directory.
      counts: number of layers of each stage.
      nodes: the machine of each worker; None: Ray chooses.
      actors: the `Actors` that start the workers.
      kind: class of the actors.
      clock: object with ``monotonic()`` and ``sleep(seconds)``.
      needs: bytes of the arrays of each stage, see `decent_jax.actors.ray_cluster.check_memory`.
    """

    def __init__(
        self,
        config: Config,
        workdir: Path,
        counts: list[int],
        nodes: list[Node | None],
        actors: Actors,
        kind: type = Worker,
        clock: Any = time,
        needs: Sequence[float] = (),
    ):
        self._config, self._workdir, self._actors, self._clock = config, workdir, actors, clock
        self._stages = len(counts)
        run, ray = (config, str(workdir)), config.ray
        secret = secrets.token_bytes(32)
        self.specs = [
            WorkerSpec(*run, i, s, counts)
            for i in range(config.num_replicas)
            for s in range(self._stages)
        ]
        self._started = [
            actors.start(
                *(kind, worker, secret),
                log=worker.log,
                on=node,
                cpus=ray.cpus,
                gpus=ray.gpus,
                memory=reserved(ray, needs[worker.stage] if needs else 0.0),
                threads=_THREADS,
            )
            for worker, node in zip(self.specs, nodes, strict=True)
        ]
        # Per worker: its pending heartbeat, the time of the request, and the timeout that applies;
        # at first, that is the timeout of its start.
        self._beats: list[tuple[Call, float, str]] = [
            (actor.call("beat"), clock.monotonic(), "timeout_s") for actor in self._started
        ]

    def open(self, data: dict[str, str]) -> None:
        """Start jax in all workers and create their programs, see `Worker`.

        Args:
          data: facts about the data on which all workers must agree.
        """
        answers, calls = self.all("addresses"), []
        for worker, actor in zip(self.specs, self._started, strict=True):
            coordinator, _ = answers[worker.stage]
            first = worker.replica * self._stages
            addresses = [address for _, address in answers[first : first + self._stages]]
            calls.append(actor.call("open", coordinator, addresses, data))
        self.wait(calls)
        self.all("connect")

    def all(self, name: str, *args: object) -> list[Any]:
        """Call a method of each worker; returns the results."""
        return self.wait(self.begin(name, *args))

    def begin(self, name: str, *args: object) -> list[Call]:
        """Start a call of a method of each worker."""
        return [actor.call(name, *args) for actor in self._started]

    def wait(self, calls: list[Call], pause: Callable[[], None] = lambda: None) -> list[Any]:
        """Wait for one call per worker; ``pause`` is called meanwhile, and may raise.

        Raises:
          TrainingFailed: a worker was killed, has failed or is silent; the message names it.
          ConfigError: a worker cannot do what the config asks of it.
        """
        waiting, results = dict(enumerate(calls)), {}
        while waiting:
            for k in self._actors.ended(waiting, _LOOK_S):
                results[k] = self._result(self.specs[k], waiting.pop(k))
            self._listen()
            pause()
        return [results[k] for k in range(len(calls))]

    def over(self, calls: list[Call]) -> bool:
        """Whether all of these calls have ended, or one has failed, so that `wait` would raise."""
        done = self._actors.ended(dict(enumerate(calls)), 0.0, count=len(calls))
        try:
            for k in done:
                calls[k].result()
        except Unanswered:
            return True
        return len(done) == len(calls)

    def _listen(self) -> None:
        """Check the heartbeats of all workers; raises TrainingFailed if one is late."""
        cluster = self._config.cluster
        calls = {k: call for k, (call, *_) in enumerate(self._beats)}
        answered, now = self._actors.ended(calls, 0.0, len(calls)), self._clock.monotonic()
        for k, (call, asked, name) in enumerate(self._beats):
            if k in answered:
                self._result(self.specs[k], call)
                self._beats[k] = self._started[k].call("beat"), now, "heartbeat_s"
            elif now - asked > (most := getattr(cluster, name)):
                raise TrainingFailed(
                    f"{self.specs[k].name} has been silent for cluster.{name} "
                    f"({most} s); {self._advice(self.specs[k])}"
                )

    def _result(self, worker: WorkerSpec, call: Call) -> Any:
        """The result of a call that has ended; raises the error that explains its failure."""
        try:
            return call.result()
        except Unanswered as failure:
            error = failure
        if isinstance(error, Lost) and isinstance(error.cause, ConfigError | CheckpointError):
            raise type(error.cause)(f"{worker.name}: {error.cause}") from None
        killed = isinstance(error, Lost) and error.killed
        if not killed and (dead := self._dead()) is not None:
            raise TrainingFailed(f"{dead.name} was killed; {self._advice(dead)}") from None
        raise TrainingFailed(f"{worker.name} {error}; {self._advice(worker)}") from None

    def _dead(self) -> WorkerSpec | None:
        """The worker that was killed, or None.

        Other workers fail in an exchange with it before Ray notices its death.
        """
        ends = self._clock.monotonic() + _NOTICED_S
        while self._clock.monotonic() < ends:
            for worker, actor in zip(self.specs, self._started, strict=True):
                try:
                    actor.call("beat").result(_LOOK_S)
                except Lost as error:
                    if error.killed:
                        return worker
                except Silent:  # no answer yet
                    continue
            self._clock.sleep(_LOOK_S / 5)
        return None

    def _advice(self, worker: WorkerSpec) -> str:
        return f"{folders.what_next(self._workdir)}; its output is in {worker.log}"

    def __enter__(self) -> "Workers":
        return self

    def __exit__(self, *_) -> None:
        for actor in self._started:
            actor.kill()


def nodes_of(plan: Plan | None, there: list[Node], count: int) -> list[Node | None]:
    """The machine of each worker, replica by replica; None: Ray chooses.

    Args:
      plan: the plan, whose device ``host/k`` is on the Ray node with the name
        (``ray start --node-name``) or the host name ``host``; or None.
      there: the machines of the cluster.
      count: number of workers.

    Raises:
      ConfigError: the plan names a machine that is not in the cluster.
    """
    if plan is None:
        return [None] * count
    by_name = {name: node for node in there for name in node.names}
    hosts = [device.rpartition("/")[0] or device for device in plan.devices]
    missing = sorted({host for host in hosts if host not in by_name})
    if missing:
        why = f"must be left out, or name machines of Ray's cluster ({', '.join(sorted(by_name))})"
        raise ConfigError.about("cluster.plan", missing[0], why)
    return [by_name[host] for host in hosts]


class WorkerCheckpoints:
    """Like `decent_jax.checkpoints.on_disk.Checkpointer`, but the workers write.

    Args:
      workdir: the run directory.
      workers: the workers of the run.
      keep: number of checkpoints to keep.
    """

    def __init__(self, workdir: Path, workers: Workers, keep: int):
        self.workdir, self._workers, self._keep = workdir, workers, keep
        self._writing: tuple[list[Call], Path, Json, int] | None = None
        self._saved = -1
        folders.clear(workdir)

    def steps(self) -> list[int]:
        """Steps with a finished checkpoint, the oldest first."""
        return folders.steps(self.workdir / FOLDER)

    def newest(self, say: Callable[[str], object]) -> Json:
        """Restore the newest intact checkpoint in all workers; returns its meta, or {}."""

        def restore(checkpoint: Path, meta: Json) -> None:
            for why in self._workers.all("restore", checkpoint, meta):
                if why:
                    raise CheckpointError(why)

        _, meta = folders.first_whole(self.workdir / FOLDER, restore, say) or (None, {})
        self._saved = meta.get("step", -1)
        return meta

    def save(self, step: int, state: None, meta: Json) -> None:
        """Copy the state of all workers, and write it in the background."""
        if step != self._saved:
            self._saved = step
            self._save("save", FOLDER, step, meta, self._keep)

    def save_best(self, step: int, params: None, model_state: None, meta: Json) -> None:
        """Save the consensus model as the best so far, in the background."""
        self._save("save_model", BEST, step, meta, keep=1)

    def check(self) -> None:
        """Finish a checkpoint once it is written, or raise CheckpointError if that failed."""
        if self._writing is not None and self._workers.over(self._writing[0]):
            self.wait()

    def wait(self) -> None:
        """Wait until everything saved so far is on disk; raises CheckpointError if that fails."""
        if self._writing is None:
            return
        (calls, draft, meta, keep), self._writing = self._writing, None
        try:
            self._workers.wait(calls)
        except TrainingFailed as error:
            raise CheckpointError(f"a checkpoint could not be written: {error}") from None
        folders.finish(draft, meta, keep)

    def close(self) -> None:
        """As `wait`."""
        self.wait()

    def _save(self, how: str, name: str, step: int, meta: Json, keep: int) -> None:
        self.wait()
        draft = folders.draft_of(self.workdir / name, step)
        sums = self._workers.all(how, draft)
        of_workers = zip(self._workers.specs, sums, strict=True)
        parts = {f"{STAGE}{spec.stage}": part for spec, part in of_workers if spec.replica == 0}
        meta = meta | {"step": step, "checksums": parts}
        self._writing = self._workers.begin("saved"), draft, meta, keep
