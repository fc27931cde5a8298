"""Records of its own for every replica: who owns what, in which order they come, and whole runs."""

import numpy as np
import pytest
import small_runs
import tiny
from refusals import refuses
from test_data_token_files import stream
from toys.waves import Points

from decent_jax.data import loader, partition
from decent_jax.ground.errors import DataError

LABELS = np.random.default_rng(0).choice(7, 2003, p=[0.4, 0.2, 0.1, 0.1, 0.1, 0.06, 0.04]) * 3


# --- who owns what --------------------------------------------------------------------------------


@pytest.mark.parametrize(("n", "alpha"), [(1, 1.0), (2, 1e-300), (8, 0.01), (2003, 1e6)])
def test_every_record_once_and_equally_many(n, alpha):
    shares = partition.dirichlet(LABELS, n, alpha, seed=1)
    assert shares.num_replicas == n
    owned = np.concatenate([shares.records(replica) for replica in range(n)])
    assert len(set(owned.tolist())) == len(owned) == 2003 - 2003 % n
    assert shares.class_names == tuple(map(str, range(0, 21, 3)))
    for replica in range(n):
        records = shares.records(replica)
        assert len(records) == 2003 // n and (np.diff(records) > 0).all()
        wanted = [(LABELS[records] == k).sum() for k in range(0, 21, 3)]
        assert shares.counts[replica].tolist() == wanted


@pytest.mark.parametrize("alpha", [1e-300, 0.05, 1.0, 30.0, 1e300])
@pytest.mark.parametrize("prior", [np.full(10, 0.1), np.array([0.6, 0.25, 0.1, 0.049, 0.001])])
def test_mixtures_are_dirichlet(prior, alpha):
    """q ~ Dirichlet(a), a = alpha * p / sum(p^2), has E q = p and, with A = sum(a),
    E q_k^2 = a_k (a_k + 1) / (A (A + 1)); so
    E sum(q^2) = (A sum(p^2) + 1) / (A + 1) = (alpha + 1) / (alpha / sum(p^2) + 1)."""
    logs = partition._log_mixtures(prior, 20000, alpha, np.random.default_rng(0))
    q = np.exp(logs - logs.max(axis=1, keepdims=True))
    q /= q.sum(axis=1, keepdims=True)
    np.testing.assert_allclose(q.mean(axis=0), prior, atol=5 * np.sqrt(0.25 / 20000))
    wanted = (alpha + 1) / (alpha / (prior**2).sum() + 1)
    assert (q**2).sum(axis=1).mean() == pytest.approx(wanted, rel=0.01)


class Labelled:
    """Records that are their own numbers."""

    class_names = ("even", "odd")

    def __init__(self, labels):
        self.labels = labels

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        return np.int64(index)

    def __repr__(self):
        return "Labelled"


def test_sources_that_cannot_be_shared_out():
    def make(source, **changes):
        return partition.for_run(
            source, **({"num_replicas": 2, "batch_size": 8, "alpha": 1.0, "seed": 0} | changes)
        )

    assert make(Labelled(np.arange(8) % 2)).counts.sum() == 8
    for source, *named in (
        ([1, 2, 3], "data.partition", [1, 2, 3]),
        (Labelled(np.ones(9, int)), "data.partition", 9, "odd"),
        (Labelled(np.arange(7) % 2), "data.partition", 3, 7, 2, 4),
    ):
        with refuses(*named, error=DataError):
            make(source)


# --- the order they come in -----------------------------------------------------------------------

SOURCE = Labelled(np.arange(103) % 2)


def test_each_replica_reads_its_own_records_once_an_epoch_in_any_number_of_processes():
    shares = partition.dirichlet(SOURCE.labels, 4, 0.3, seed=0)

    def read(steps, seed=5, **options):
        source = loader.Partitioned(SOURCE, shares)
        return stream(source, steps, num_replicas=4, batch_size=12, seed=seed, **options)

    batches = read(25)  # 25 records a replica: 3 epochs
    for replica in range(4):
        epochs = batches[:, replica].reshape(3, 25)
        np.testing.assert_array_equal(np.sort(epochs), np.tile(shares.records(replica), (3, 1)))
        assert len({tuple(epoch) for epoch in epochs}) == 3
    ranks = np.stack([np.searchsorted(shares.records(r), batches[:, r].ravel()) for r in range(4)])
    assert len(set(map(tuple, ranks))) == 4  # each in an order of its own
    assert not np.array_equal(batches, read(25, seed=6))
    np.testing.assert_array_equal(read(25, processes=4), batches)
    np.testing.assert_array_equal(read(3, start_step=20, processes=2, prefetch=0), batches[20:23])


# --- whole runs -----------------------------------------------------------------------------------


def test_a_run_resumed_elsewhere_and_with_fewer_replicas(
    tmp_path, capfd, compile_once, monkeypatch
):
    """4 steps, and as many with a resume on four devices: the same records."""
    labels = property(lambda points: np.arange(len(points)) % 10)
    monkeypatch.setattr(Points, "labels", labels, raising=False)
    own = {"data": {"partition": "dirichlet", "alpha": 0.1}, "steps": 4}

    def config(**changes):
        return tiny.waves(**own | changes)

    straight = tiny.run(config(checkpoint={"every": 2}), tmp_path / "straight")
    assert "data.partition dirichlet, alpha 0.1" in capfd.readouterr().err
    summary = tiny.summary(straight)["partition"]
    assert summary["name"] == "dirichlet" and summary["records_per_replica"] == 100
    losses = tiny.losses(straight)
    small_runs.killed_after(2, straight, tmp_path / "resumed")
    resumed = tiny.run(config(mesh={"devices": 4}), tmp_path / "resumed")
    np.testing.assert_array_equal(tiny.losses(resumed)[:2], losses[:2])
    np.testing.assert_allclose(tiny.losses(resumed), losses, rtol=1e-4)
    tiny.run(config(num_replicas=2, steps=5), resumed)
    assert tiny.summary(resumed)["partition"]["records_per_replica"] == 200
