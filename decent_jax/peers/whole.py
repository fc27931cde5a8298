"""The run as a whole: rows of metrics.jsonl from all peers, and the consensus of their copies."""

from collections.abc import Collection
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict

from decent_jax import replicas
from decent_jax.peers.boundary import averaged
from decent_jax.peers.formats import Arrays, Format
from decent_jax.train.experiment import Experiment
from decent_jax.train.step import TrainState
from decent_jax.train.synchronous import init


class Whole:
    """What is computed from the reports and the copies of all peers.

    Args:
      config: of the run.
      experiment: of one replica, on this process's devices.
    """

    def __init__(self, config: ConfigDict, experiment: Experiment):
        self._config, self._experiment = config, experiment
        self.template = init(experiment)
        self._losses: dict[tuple[int, int], tuple[float, int]] = {}  # of each peer, at the last row

    def message_bytes(self) -> int:
        """Of a copy, as peers send it."""
        copy = averaged(self._experiment.task.mixes_state, self.template)
        return message_bytes(self._config.peers.wire, copy)

    def row(
        self, peers: Collection[dict[str, Any]], step: int, steps: int, seconds: float
    ) -> dict[str, float]:
        """The row of ``step``, ``steps`` and ``seconds`` after the one before.

        As in any other run, ``train/loss`` is the mean over the steps since then.

        Args:
          peers: as `Roster.look` has them; those that are alive count, or if none is, those that
            were.
        """
        task, config = self._experiment.task, self._config
        reported = [one for one in peers if "met" in one]
        peers = [one for one in reported if one["alive"]] or reported
        total, count, means = 0.0, 0, []
        for one in reported:
            now, peer = one.get("losses", (0.0, 0)), (one["slot"], one["incarnation"])
            before = self._losses.get(peer, (0.0, 0))
            self._losses[peer] = now
            if now[1] > before[1]:
                sums, made = now[0] - before[0], now[1] - before[1]
                total, count, means = total + sums, count + made, [*means, sums / made]
        means = means or [np.nan]
        squares = [one["distance"] ** 2 for one in peers if one.get("distance")]
        n = max(len(peers), 1)
        # Of two random peers: E ||x_i - x_j||^2 = 2 n / (n - 1) mean_i ||x_i - mean||^2
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
                f"peers/{one['slot']}/{name}": float(one.get(name, 0))
                for one in peers
                for name in ("steps", "incarnation", "stale")
            },
        }

    def state(self, copies: list[Arrays]) -> TrainState | None:
        """The copies that peers have published, stacked (m, ...); None without any."""
        if not copies:
            return None
        template, mixes = self.template, self._experiment.task.mixes_state
        like = averaged(mixes, template)
        stacked = [jnp.asarray(np.stack(leaves)) for leaves in zip(*copies, strict=True)]
        params, model_state = jax.tree.unflatten(jax.tree.structure(like), stacked)
        if not mixes:
            one = replicas.take(template.model_state, 0)
            model_state = replicas.broadcast(one, len(copies))
        return template._replace(params=params, model_state=model_state)

    def consensus(self, state: TrainState) -> TrainState:
        """The mean of stacked copies as the state of one replica, for a checkpoint."""
        place_all = self._experiment.placement.place_all

        @jax.jit
        def mean(tree):
            return place_all(replicas.broadcast(replicas.consensus_mean(tree), 1))

        params, model_state = mean((state.params, state.model_state))
        return self.template._replace(params=params, model_state=model_state)


def message_bytes(wire: str, copy: Any) -> int:
    """Bytes of a copy (1, ...) in a format."""
    return Format(wire).bytes_sent([x.shape[1:] for x in jax.tree.leaves(copy)])


def counts_of(peers: Collection[dict[str, Any]]) -> dict[str, int]:
    """The outcomes of all peers' questions, see `Meetings.counts`."""
    names = ("met", "declined", "not_understood", "lost")
    return {name: sum(one.get(name, 0) for one in peers) for name in names}
