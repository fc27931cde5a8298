"""Checkpoints of pipelines: of another cut, damaged in one stage, killed before they are whole."""

import itertools
import shutil
from types import SimpleNamespace

import numpy as np
import orbax.checkpoint as ocp
import pytest
import tiny
from damage import cut_short, flip_bits
from networks import assert_close
from pipeline_threads import Threads
from test_pipelines import config_of, flat

from decent_jax.checkpoints import on_disk
from decent_jax.checkpoints.on_disk import reason_of
from decent_jax.ground.errors import CheckpointError, TrainingFailed
from decent_jax.monitor.goodput import Clock
from decent_jax.pipelines.runner import Pipelines
from decent_jax.pipelines.worker import open_run
from decent_jax.pipelines.workers import WorkerCheckpoints
from decent_jax.train import saved_model
from decent_jax.train.config import parse

pytestmark = pytest.mark.usefixtures("compile_once")

META = {"examples": 0, "seconds": 0.0, "best": 2.5}


class Workers:
    """The stages of this process, called as `WorkerCheckpoints` calls workers."""

    has_written, fails = False, None

    def __init__(self, threads):
        self.stages = threads.stages
        self.specs = [SimpleNamespace(replica=0, stage=s.part.stage) for s in self.stages]
        self._writer = ocp.StandardCheckpointer()  # of which a process may have one

    def all(self, name, *args):
        if name == "restore":
            return [self._restore(stage, *args) for stage in self.stages]
        return [self._save(stage, name, *args) for stage in self.stages]

    def _save(self, stage, name, draft):
        sums = getattr(stage, name)(self._writer, draft)
        self._writer.wait_until_finished()
        return sums

    def _restore(self, stage, folder, meta):
        try:
            stage.restore(folder, meta)
        except Exception as error:
            return reason_of(error)
        return ""

    def begin(self, name):
        return []

    def over(self, calls):
        return self.has_written

    def wait(self, calls):
        if self.fails is not None:
            raise self.fails


def checkpoints_of(threads, workdir, keep=2):
    return WorkerCheckpoints(workdir, Workers(threads), keep)


def meta_of(threads):
    return META | {"num_replicas": threads.stages[0].placement.num_replicas}


def config_for(data, stages, n=2):
    model = {"layers": 2, "dropout": 0.0}
    return config_of(data, stages, 2, num_replicas=n, algorithm="decentralized_sgd", model=model)


@pytest.fixture(scope="module")
def made(tiny_data, tmp_path_factory, compile_once):
    """``made(stages, n, start)``: threads of a run that has steps to go."""
    kept = {}  # what restores a checkpoint may have any state

    def made(stages, n=2, start=3):
        config, key = config_for(tiny_data, stages, n), (stages, n)
        threads = Threads(config, tmp_path_factory.mktemp("threads"), start, kept.get(key))
        kept[key] = threads.stages
        return threads

    return made


@pytest.fixture(scope="module")
def run(made, tmp_path_factory):
    """(folder of a run of two stages, parameters after steps 1, 3 and 6)."""
    folder, after = tmp_path_factory.mktemp("run"), {}
    with made(2, start=0) as threads:
        checkpoints = checkpoints_of(threads, folder)
        for start, stop in itertools.pairwise([0, 1, 3, 6]):
            threads.train(start, stop)
            after[stop] = threads.params()
            if stop < 6:
                checkpoints.save(stop, None, meta_of(threads))
                checkpoints.save_best(stop, None, None, {"eval_loss": 2.5})
        checkpoints.close()
    return folder, after


@pytest.mark.slow
def test_another_number_of_stages_and_replicas_goes_on_from_a_checkpoint(run, made):
    """Two stages as before give the same bits, one stage the same numbers."""
    folder, after = run
    with made(2) as again:
        assert checkpoints_of(again, folder).newest(print)["step"] == 3
        again.train(3, 6)
        for name, value in again.params().items():
            np.testing.assert_array_equal(value, after[6][name], err_msg=name)
    with made(1) as one:
        checkpoints_of(one, folder).newest(print)
        one.train(3, 6)
        assert_close(one.params(), after[6], rtol=1e-6)
    with made(2, n=1) as mean:
        checkpoints_of(mean, folder).newest(print)
        wanted = {name: x.mean(0, keepdims=True) for name, x in after[3].items()}
        assert_close(mean.params(), wanted, 1e-6)


@pytest.mark.parametrize("which", ["last", "best"])
def test_the_model_of_a_run_is_that_of_all_its_stages(run, which):
    folder, after = run
    params, model_state, meta = saved_model.restore_model(folder, which)
    assert meta["step"] == 3 and model_state == {}
    assert [path.name for path in (folder / "best").iterdir()] == ["3"]
    assert_close(flat(params), {name: x.mean(0) for name, x in after[3].items()}, rtol=1e-6)


def test_a_run_ends_with_a_sample_of_its_last_model(run, tiny_data, tmp_path, monkeypatch):
    folder, after = shutil.copytree(run[0], tmp_path / "run"), run[1]
    shutil.rmtree(folder / "checkpoints" / "3")  # of the best model
    (folder / "metrics.jsonl").touch()
    shown = []
    with open_run(parse(config_for(tiny_data, 2)), folder) as (experiment, work, _, counts):
        show = lambda params, _: shown.append(params) or ""  # noqa: E731
        monkeypatch.setattr(experiment.task, "demonstrate", show)
        saver = SimpleNamespace(evaluated={}, best=2.5)
        ended = Pipelines(experiment, work, counts, None).finish(1, saver, Clock())
    about = {"layers": [1, 1], "order": "1f1b", "micro_batches": 2, "codec": "float32"}
    assert ended["steps"] == 1
    assert ended["pipeline"] == about | {"bytes_between_stages_per_step": 8 * 8 * 16 * 4}
    assert_close(flat(shown[0]), {name: x.mean(0) for name, x in after[1].items()}, rtol=1e-6)


@pytest.mark.parametrize("damage", [flip_bits, cut_short])
def test_all_stages_go_on_from_the_checkpoint_before_one_that_is_damaged(
    run, made, tmp_path, damage
):
    folder = shutil.copytree(run[0], tmp_path / "run")
    (folder / "checkpoints" / "3" / "stage-1").rename(folder / "checkpoints" / "3" / "state")
    damage(folder / "checkpoints" / "3")
    (folder / "checkpoints" / "3" / "state").rename(folder / "checkpoints" / "3" / "stage-1")
    said = []
    with made(2) as threads:
        checkpoints = checkpoints_of(threads, folder)
        assert checkpoints.newest(said.append)["step"] == 1
        for name, value in threads.params().items():
            np.testing.assert_array_equal(value, run[1][1][name], err_msg=name)
        assert "step 3 is damaged" in said[0]
        # The next one is not removed in favour of that one, nor of a session's that was killed.
        (folder / "checkpoints" / ".2.draft" / "stage-0").mkdir(parents=True)
        assert not on_disk.drop_best_after(folder, 1)
        checkpoints_of(threads, folder, keep=1).save(2, None, meta_of(threads))
        again = checkpoints_of(threads, folder, keep=1)
        again.save(2, None, meta_of(threads))
        again.close()
    assert tiny.saved_steps(folder) == [2] and not list(folder.glob("*/.*"))


def test_a_checkpoint_that_a_stage_has_not_written_does_not_count(run, made, tmp_path):
    folder = shutil.copytree(run[0], tmp_path / "run")
    with made(2) as threads:
        workers = Workers(threads)
        checkpoints = WorkerCheckpoints(folder, workers, 2)
        checkpoints.save(9, None, meta_of(threads))
        checkpoints.check()  # while a stage writes
        assert tiny.saved_steps(folder) == [1, 3]
        workers.has_written = True
        checkpoints.check()
        checkpoints.save(9, None, meta_of(threads))  # it is there
        assert tiny.saved_steps(folder) == [3, 9]
        workers.fails = TrainingFailed("stage 1")
        checkpoints.save(10, None, meta_of(threads))
        with pytest.raises(CheckpointError, match="stage 1"):
            checkpoints.check()
        checkpoints.close()
        assert tiny.saved_steps(folder) == [3, 9]
        shutil.rmtree(folder / "checkpoints" / "9" / "stage-1")
        with pytest.raises(CheckpointError, match="step 9"):
            shutil.rmtree(folder / "checkpoints" / "3")
            checkpoints_of(threads, folder).newest(print)
