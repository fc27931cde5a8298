"""The loop of every kind of run: its rows, also the last one and those across a resume."""

import queue
import signal

import numpy as np
import pytest
import tiny

from decent_jax.ground.errors import DataError, Interrupted
from decent_jax.peers.between import Between, PeerRunner, Pulse
from decent_jax.peers.formats import Format
from decent_jax.peers.rule import Meetings
from decent_jax.peers.setup import Place, open_peer
from decent_jax.train import TrainingFailed, loop
from decent_jax.train.synchronous import Feed

pytestmark = pytest.mark.usefixtures("compile_once")


def measured(folder):
    """Rows without the times."""
    return [
        {name: value for name, value in row.items() if not name.startswith("perf/")}
        for row in tiny.rows(folder)
    ]


@pytest.mark.parametrize("stopped", [8, 10])
def test_a_row_that_a_checkpoint_cuts_is_that_of_the_undisturbed_run(stopped, tmp_path):
    """Its sums travel in the checkpoint, also of a step that had been dispatched last."""
    config = tiny.waves(log={"every": 5}, checkpoint={"every": 3})
    whole = tiny.run(config, tmp_path / "whole")
    folder = tmp_path / "run"
    with pytest.raises(Interrupted):
        tiny.run(config, folder, signals=tiny.SignalAfter(stopped, signal.SIGTERM))
    tiny.run(config, folder)
    assert [row["step"] for row in measured(whole)] == [5, 10, 12]
    assert measured(folder) == measured(whole)


def test_a_checkpoint_of_before_the_last_row_repeats_it(tmp_path):
    """Killed after step 10 was logged; the newest checkpoint is of step 9."""
    config = tiny.waves(log={"every": 5}, checkpoint={"every": 3})
    whole = tiny.run(config, tmp_path / "run")
    wanted = measured(whole)
    for step in (12,):
        (whole / "checkpoints" / str(step)).rename(tmp_path / str(step))
    tiny.run(config, whole)
    assert measured(whole) == wanted


def test_a_record_that_cannot_be_used_ends_the_run_behind_the_row_before_it(tmp_path, monkeypatch):
    batches, count = Feed.next, iter(range(100))

    def next_batch(feed):
        if next(count) == 6:
            raise DataError("photo 7 is cut short")
        return batches(feed)

    monkeypatch.setattr(Feed, "next", next_batch)
    with pytest.raises(TrainingFailed) as failed:
        tiny.run(tiny.waves(log={"every": 2}), tmp_path / "run")
    assert "photo 7" in str(failed.value) and "step 6" in str(failed.value)
    assert [row["step"] for row in tiny.rows(tmp_path / "run")] == [2, 4, 6]
    assert tiny.saved_steps(tmp_path / "run") == [6]


def test_a_peer_keeps_its_last_row(tmp_path):
    """Four peers make three steps of the run: twelve of this one, whose last row has two."""
    config = tiny.waves(algorithm="swarm", peers={"use": True}, steps=3, log={"every": 5})
    config.optimizer.name = "sgd"
    place = Place(config.to_dict(), str(tmp_path), 0, 0, None, 4)
    meetings = Meetings(place.name, Format("float32"), 1.0, weighted=False)
    with open_peer(place) as (experiment, work):
        jobs = queue.SimpleQueue()
        between = Between(experiment, place, Pulse(4, 3), meetings, jobs, lambda: None, None)
        ended = loop.train(PeerRunner(experiment, work, between), work)
    assert ended == {"steps": 12, "how": "end"}
    rows = tiny.rows(place.folder)
    assert [row["step"] for row in rows] == [5, 10, 12]
    assert all(np.isfinite(row["train/loss"]) for row in rows)
