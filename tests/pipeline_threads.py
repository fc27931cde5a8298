"""Pipelines in this process: a thread for each stage, which holds all replicas of it."""

from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np

from decent_jax import tasks
from decent_jax.ground.progress import announce
from decent_jax.pipelines import part as parts
from decent_jax.pipelines.channels import Mailbox
from decent_jax.pipelines.part import Part
from decent_jax.pipelines.stage import Grid, Stage
from decent_jax.pipelines.worker import Worker
from decent_jax.train import config as config_lib
from decent_jax.train.experiment import durations


class Threads:
    """All stages of a run; a context that stops what reads data."""

    def __init__(self, config, workdir, start=0):
        parts.check(config)
        schedule, _ = config_lib.check(config)
        task = tasks.find(config.task).make(config, workdir, announce)
        rate = durations(config, task)[2]
        placement = parts.place(config.num_replicas)
        grid = Grid(config, schedule, placement, parts.method(config, schedule, rate, placement))
        counts = parts.layers_of(config, task.config)
        self.stages = [Stage(grid, Part(task, s, counts)) for s in range(len(counts))]
        boxes = [Mailbox() for _ in counts]
        self.workers = [
            Worker(stage, box, lambda to, key, value: boxes[to].put(key, value), start)
            for stage, box in zip(self.stages, boxes, strict=True)
        ]
        self._threads = ThreadPoolExecutor(len(counts))

    def _all(self, name, *args):
        calls = [self._threads.submit(getattr(worker, name), *args) for worker in self.workers]
        return [call.result() for call in calls]

    def train(self, start, stop, row=False):
        """The spans of all stages."""
        return self._all("train", start, stop, row)

    def gradient(self):
        """{path: (n, ...)} of the gradient of step 0, which training makes again."""
        found = {}
        for worker, (_, grads) in zip(self.workers, self._all("gradient", 0), strict=True):
            for path, leaf in jax.tree_util.tree_leaves_with_path(grads):
                found[jax.tree_util.keystr(path)] = np.asarray(leaf)
            worker.close()
            worker._batches = worker._open(0) if worker._reads else None
        return found

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
        for worker in self.workers:
            worker.close()
        self._threads.shutdown()
