"""Trackers: what each gets, also one's own, and a run whose tracker fails."""

import importlib.machinery
import json
import sys
import types

import pytest
import tiny
from refusals import refused

from decent_jax.monitor import goodput_file, trackers
from decent_jax.monitor.metrics_file import MetricWriter
from decent_jax.monitor.trackers import Trackers
from decent_jax.train import config as config_lib

pytestmark = pytest.mark.usefixtures("compile_once")


class Recorder:
    """Remembers what it gets."""

    made: list = []  # noqa: RUF012 (read by the tests)

    def __init__(self, workdir, start_step):
        self.calls = [("begin", workdir, start_step)]
        self.made.append(self)

    def log(self, metrics, step):
        self.calls.append(("row", step, dict(metrics)))

    log_hyperparameters, log_summary, finish = (
        lambda self, *given, kind=kind: self.calls.append((kind, *given))
        for kind in ("config", "summary", "finish")
    )


class Failing(Recorder):
    """Raises at the second row."""

    def log(self, metrics, step):
        super().log(metrics, step)
        if step > 4:
            raise ConnectionError("the server\nis gone")


def test_a_run_with_trackers_of_ones_own(tmp_path, monkeypatch, capsys):
    """One gets everything, and one that raises is dropped; the run ends as it would without."""
    monkeypatch.setattr(Recorder, "made", [])
    monkeypatch.setitem(trackers.TRACKERS, "mine", Recorder)
    own = f"mine, {__name__}.Failing"
    folder = tiny.run(tiny.waves(log={"every": 4, "trackers": own}), tmp_path / "run")
    good, failing = Recorder.made
    begin, config, *rows, summary, finish = good.calls
    assert begin == ("begin", folder, 0) and finish == ("finish",)
    assert config[1]["log.trackers"] == own and config[1]["num_replicas"] == 4
    seen = {}
    for _, step, metrics in rows:
        seen.setdefault(step, {"step": step}).update(metrics)
    assert list(seen.values()) == tiny.rows(folder)
    assert json.loads(json.dumps(summary[1])) == tiny.summary(folder)
    assert [call[0] for call in failing.calls] == ["begin", "config", "row", "row"]
    ((_, said),) = goodput_file.incidents(folder)
    assert "Failing" in said and "ConnectionError: the server is gone" in said
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    "name", ["comet", "no_such_module.Tracker", f"{__name__}.Nobody", "builtins.dict"]
)
def test_trackers_that_cannot_be(name):
    with refused("log.trackers"):
        config_lib.validate(tiny.waves(log={"trackers": f"tensorboard,{name}"}))


@pytest.mark.parametrize("name", ["tensorboard", "wandb"])
def test_a_tracker_whose_package_is_not_installed_is_refused(name, monkeypatch):
    monkeypatch.setattr(trackers.importlib.util, "find_spec", lambda package: None)
    with refused("log.trackers", name):
        trackers.named(name)


def test_tensorboard_and_wandb_get_the_same_scalars(tmp_path, monkeypatch):
    """A resumed run continues the same run of W&B."""
    tensorboard, calls, purged = pytest.importorskip("tensorboardX"), [], []
    make = tensorboard.SummaryWriter
    note = lambda folder, purge_step: purged.append(purge_step) or make(folder, purge_step)  # noqa: E731
    monkeypatch.setattr(tensorboard, "SummaryWriter", note)
    told = types.SimpleNamespace(update=lambda entries, **_: calls.append(entries))

    class Run:
        config = summary = told

        def log(self, scalars, step):
            calls.append((step, scalars))

        def finish(self):
            calls.append("finish")

    wandb = types.ModuleType("wandb")
    wandb.__spec__ = importlib.machinery.ModuleSpec("wandb", None)
    wandb.init = lambda **settings: calls.append(settings) or Run()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    makes = trackers.named("tensorboard, wandb")
    for start_step in (0, 10):
        both = Trackers(makes, tmp_path, start_step, pytest.fail)
        both.log_hyperparameters({"seed": 1})
        with MetricWriter(tmp_path, trackers=both, start_step=start_step) as writer:
            writer.write(start_step + 10, {"train/loss": 2.5})
        both.log_summary({"final": {"eval/loss": 2.25}})
        both.finish()
    first, config, logged, summary, finish, second, *_ = calls
    assert config == {"seed": 1} and first == second and purged == [1, 11]
    words = {"project": "decent_jax", "name": tmp_path.name, "resume": "allow"}
    assert first == words | {"dir": str(tmp_path), "id": first["id"]}
    assert summary == {"final": {"eval/loss": 2.25}}
    assert logged == (10, {"train/loss": 2.5}) and finish == "finish"
    events = list((tmp_path / "tensorboard").iterdir())
    text = b"".join(path.read_bytes() for path in events)
    assert all(word in text for word in (b"train/loss", b"final.eval/loss", b"| seed | 1 |"))
