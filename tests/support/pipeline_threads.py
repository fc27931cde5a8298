"""Pipelines in this process: a thread for each stage, which holds all replicas of it."""

from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np

from decent_jax import tasks
from decent_jax.ground.progress import announce
from decent_jax.pipelines import part as parts
from decent_jax.pipelines.executor import Mailbox, StageExecutor, open_batches
from decent_jax.pipelines.part import Part
from decent_jax.pipelines.stage import Stage
from decent_jax.train import config as config_lib
from decent_jax.train.experiment import durations


class Threads:
    """All stages of a run; a context that stops what reads data.

    ``stages`` are those of an earlier session of the same run, whose programs are compiled.
    """

    def __init__(self, config, workdir, start=0, stages=None):
        config = config_lib.parse(config)
        parts.check(config)
        schedule, _ = config_lib.check(config)
        task = tasks.find(config.task).make(config, workdir, announce)
        rate = durations(config, task)[2]
        placement = parts.place(config.num_replicas)
        given = config, schedule, placement, parts.method(config, schedule, rate, placement)
        counts = parts.layers_of(config, task.config)
        self.stages = stages or [Stage(*given, Part(task, s, counts)) for s in range(len(counts))]
        self._batches = [open_batches(stage, start) for stage in self.stages]
        self._workers = self._made(self._batches)
        self._threads = ThreadPoolExecutor(len(counts))

    def _made(self, batches):
        """A worker for each stage."""
        boxes = [Mailbox() for _ in self.stages]
        return [
            StageExecutor(*both, lambda to, key, value: boxes[to].put(key, value), own)
            for *both, own in zip(self.stages, boxes, batches, strict=True)
        ]

    def _all(self, name, *args, workers=None):
        calls = [
            self._threads.submit(getattr(worker, name), *args)
            for worker in workers or self._workers
        ]
        return [call.result() for call in calls]

    def train(self, start, stop, row=False):
        """The spans of all stages."""
        return self._all("train", start, stop, row)

    def evaluate(self):
        """The loss of the consensus model."""
        total, count = self._all("evaluate")[-1]
        return total / count

    def params(self):
        """{path: (n, ...)} of the whole model."""
        found = {}
        for stage in self.stages:
            for path, leaf in jax.tree_util.tree_leaves_with_path(stage.state.params):
                assert jax.tree_util.keystr(path) not in found, "a parameter of two stages"
                found[jax.tree_util.keystr(path)] = np.asarray(leaf)
        return found

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for batches in filter(None, self._batches):
            batches.close()
        self._threads.shutdown()
