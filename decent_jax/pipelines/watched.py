"""The actors of all cells: placed, started, called together, and watched while they work."""

import os
import secrets
import time
from pathlib import Path
from typing import Any

import ray
from ml_collections import ConfigDict
from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from decent_jax.ground.errors import CheckpointError, ConfigError, TrainingFailed
from decent_jax.peers.start import fate, start_actor
from decent_jax.pipelines.actor import Actor
from decent_jax.pipelines.setup import LOGS, Cell
from decent_jax.plan.plan_file import Plan
from decent_jax.train.checkpoint_folder import FOLDER, steps

_LOOK_S = 0.5
_NOTICED_S = 2.0  # in which Ray knows of a dead actor
_THREADS = 4  # of an actor: heartbeats, training, what is written


class Watched:
    """The actors of a grid; a context that leaves none of them running.

    Attributes:
      cells: replica by replica, as results of `all`.

    Args:
      config: of the run.
      workdir: of the run.
      counts: layers of each stage.
      placed: Ray's scheduling strategy for each cell.
    """

    def __init__(self, config: ConfigDict, workdir: Path, counts: list[int], placed: list[Any]):
        self._config, self._workdir = config, workdir
        given = config.to_dict(), str(workdir)
        self.cells = [
            Cell(*given, i, s, counts, os.getcwd())
            for i in range(config.num_replicas)
            for s in range(len(counts))
        ]
        self._actors = [
            start_actor(Actor, config.pipeline, where, _THREADS, cell)
            for cell, where in zip(self.cells, placed, strict=True)
        ]
        # When each cell was asked, and which time-out holds: at first its process must start.
        self._beats: list[tuple[Any, float, str]] = [
            (actor.beat.remote(), time.monotonic(), "timeout_s") for actor in self._actors
        ]

    def open(self) -> None:
        """Start jax in all cells, and make their programs; see `Actor.open`."""
        secret = secrets.token_bytes(32)
        addresses = self.wait([actor.addresses.remote(secret) for actor in self._actors])
        stages = max(cell.stage for cell in self.cells) + 1
        calls = []
        for cell, actor in zip(self.cells, self._actors, strict=True):
            first = cell.replica * stages
            doors = [door for _, door in addresses[first : first + stages]]
            coordinator, _ = addresses[cell.stage]
            calls.append(actor.open.remote(coordinator, doors, secret))
        self.wait(calls)

    def all(self, name: str, *args: Any) -> list[Any]:
        """What the method of that name returns for each cell."""
        return self.wait(self.begin(name, *args))

    def begin(self, name: str, *args: Any) -> list[Any]:
        """Call the method of that name of each cell."""
        return [getattr(actor, name).remote(*args) for actor in self._actors]

    def wait(self, calls: list[Any]) -> list[Any]:
        """The results of one call for each cell.

        Raises:
          TrainingFailed: a cell was killed, has failed or is silent; it is named.
          ConfigError: a cell cannot do what the config asks of it.
        """
        waiting = list(calls)
        while waiting:
            done, waiting = ray.wait(waiting, timeout=_LOOK_S)
            for call in done:
                self._check(self.cells[calls.index(call)], call)
            self._listen()
        return ray.get(calls)

    def over(self, calls: list[Any]) -> bool:
        """Whether all of these calls have ended, or one has failed; `wait` then says which."""
        done, waiting = ray.wait(calls, num_returns=len(calls), timeout=0)
        try:
            ray.get(done)
        except RayError:
            return True
        return not waiting

    def _listen(self) -> None:
        """Ask each cell whether it lives, and name one that has not answered in time."""
        now, cluster = time.monotonic(), self._config.cluster
        for k, (call, asked, name) in enumerate(self._beats):
            if ray.wait([call], timeout=0)[0]:
                self._check(self.cells[k], call)
                self._beats[k] = self._actors[k].beat.remote(), now, "heartbeat_s"
            elif now - asked > cluster[name]:
                raise TrainingFailed(
                    f"{self.cells[k].name} has been silent for cluster.{name} "
                    f"({cluster[name]} s); {self._advice(self.cells[k])}"
                )

    def _check(self, cell: Cell, call: Any) -> None:
        """Raises what became of a call of a cell, if it has failed."""
        try:
            ray.get(call)
            return
        except RayError as failure:
            error = failure
        cause = error.cause if isinstance(error, RayTaskError) else error
        if isinstance(cause, (ConfigError, CheckpointError)):
            raise type(cause)(f"{cell.name}: {cause}") from None
        words = fate(error)
        if not isinstance(error, RayActorError) and (dead := self._dead()) is not None:
            cell, words = dead, "was killed"
        raise TrainingFailed(f"{cell.name} {words}; {self._advice(cell)}") from None

    def _dead(self) -> Cell | None:
        """The cell that is gone; others notice its end in an exchange before Ray does."""
        ends = time.monotonic() + _NOTICED_S
        while time.monotonic() < ends:
            for cell, actor in zip(self.cells, self._actors, strict=True):
                try:
                    ray.get(actor.beat.remote(), timeout=_LOOK_S)
                except RayActorError:
                    return cell
                except RayError:  # no answer yet
                    continue
            time.sleep(_LOOK_S / 5)
        return None

    def _advice(self, cell: Cell) -> str:
        there = steps(self._workdir / FOLDER)
        newest = f"goes on from the checkpoint of step {there[-1]}" if there else "begins anew"
        missing = "" if there else "no checkpoint has been written, "
        return (
            f"{missing}the same command {newest}; its last words are in "
            f"{self._workdir / LOGS / cell.log.name}"
        )

    def __enter__(self) -> "Watched":
        return self

    def __exit__(self, *_) -> None:
        for actor in self._actors:
            ray.kill(actor)


def strategies(plan: Plan | None, nodes: list[dict[str, Any]], count: int) -> list[Any]:
    """Ray's scheduling strategy of each cell, replica by replica.

    Args:
      plan: its device ``host/k`` is on the Ray node with the name (``ray start --node-name``) or
        the host name ``host``; None: spread over the nodes.
      nodes: as ``ray.nodes()`` lists them.
      count: cells.

    Raises:
      ConfigError: the plan names a machine that is not in the cluster.
    """
    if plan is None:
        return ["SPREAD"] * count
    ids: dict[str, str] = {}
    for node in nodes:
        if node["Alive"]:
            names = (node.get("NodeName", ""), node["NodeManagerHostname"])
            ids |= {name: node["NodeID"] for name in names if name}
    hosts = [device.rpartition("/")[0] or device for device in plan.devices]
    missing = sorted({host for host in hosts if host not in ids})
    if missing:
        raise ConfigError(
            f"cluster.plan is for other machines: it names {missing[0]}, and the Ray cluster has "
            f"{', '.join(sorted(ids))}; plan for these, or leave cluster.plan out"
        )
    return [NodeAffinitySchedulingStrategy(ids[host], soft=False) for host in hosts]
