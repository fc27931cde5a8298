"""Records of its own for every replica: who owns what, in which order they come, and whole runs."""

import itertools
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import small_runs
import tiny

from decent_jax import train
from decent_jax.data import loader, partition
from decent_jax.data.text import (
    document_sources,
    prepare_text,
    stdlib_corpus,
    token_folder,
    tokenizers,
)
from decent_jax.ground.errors import DataError
from decent_jax.plots import runs as plot
from decent_jax.train import ConfigError

LABELS = np.random.default_rng(0).choice(7, 2003, p=[0.4, 0.2, 0.1, 0.1, 0.1, 0.06, 0.04]) * 3


# --- who owns what --------------------------------------------------------------------------------


@pytest.mark.parametrize("alpha", [1e-300, 0.01, 1.0, 1e6])
@pytest.mark.parametrize("n", [1, 2, 8, 2003])
def test_every_record_once_and_equally_many(n, alpha):
    shares = partition.dirichlet(LABELS, n, alpha, seed=1)
    assert shares.num_replicas == n and shares.num_records == 2003
    owned = np.concatenate([shares.records(replica) for replica in range(n)])
    assert len(set(owned.tolist())) == len(owned) == 2003 - 2003 % n
    assert shares.records_left_out == 2003 % n
    assert shares.class_names == tuple(map(str, range(0, 21, 3)))
    for replica in range(n):
        records = shares.records(replica)
        assert len(records) == 2003 // n and (np.diff(records) > 0).all()
        wanted = [(LABELS[records] == k).sum() for k in range(0, 21, 3)]
        assert shares.counts[replica].tolist() == wanted


def test_the_same_seed_gives_the_same():
    one, two, other = (partition.dirichlet(LABELS, 4, 0.5, seed) for seed in (3, 3, 4))
    np.testing.assert_array_equal(one.owned, two.owned)
    assert not np.array_equal(one.owned, other.owned)
    assert not np.array_equal(one.counts, other.counts)


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


def test_replicas_get_what_they_drew():
    """Where the mixtures are so mild that the records last, their dispersion is the draw's."""
    labels = np.arange(100_000) % 10
    draws = [partition.dirichlet(labels, 16, 20.0, seed).counts / 6250 for seed in range(20)]
    got = np.mean([(q**2).sum(axis=1).mean() for q in draws])
    assert got - 0.1 == pytest.approx(21 / 201 - 0.1 + 0.9 / 6250, rel=0.2)


def test_a_large_alpha_deals_out_at_random():
    """Of a random n x K table with fixed margins, E chi^2 = (n - 1) (K - 1) N / (N - 1)."""
    values = []
    for seed in range(200):
        shares = partition.dirichlet(LABELS[:2000], 8, 1e9, seed)
        expected = shares.class_sizes / 8
        values.append(((shares.counts - expected) ** 2 / expected).sum())
    degrees = 7 * 6  # of freedom; the variance of chi^2 is twice as much
    assert np.mean(values) == pytest.approx(degrees, abs=5 * np.sqrt(2 * degrees / 200))
    assert shares.total_variation().mean() == pytest.approx(shares.total_variation_iid(), rel=0.4)


def test_a_small_alpha_gives_one_class_after_another():
    seen = set()
    for seed in range(30):
        counts = partition.dirichlet(np.arange(2000) % 2, 2, 1e-9, seed).counts
        if counts.max() == 1000:  # each wanted another class
            assert sorted(counts.ravel().tolist()) == [0, 0, 1000, 1000]
        else:  # both wanted the same one, had half of it each, and then of the other
            assert abs(counts - 500).max() < 100
        seen.add(counts.max() == 1000)
    assert seen == {True, False}
    shares = partition.dirichlet(np.arange(20_000) % 10, 8, 1e-9, seed=0)
    # At least two classes each, for 8 replicas share 10; some classes have several takers.
    assert (shares.counts > 0).sum(axis=1).mean() < 4
    assert shares.total_variation().mean() > 0.6


def test_many_classes_are_no_obstacle():
    labels = np.minimum(np.random.default_rng(0).zipf(1.3, 50_000), 5000)
    shares = partition.dirichlet(labels, 16, 0.01, seed=0)
    assert shares.counts.sum() == 50_000 and shares.total_variation().mean() > 0.7


def test_report_and_summary():
    names = [f"corpus/part-{k:04}.jsonl" for k in range(19)]
    shares = partition.dirichlet(LABELS, 12, 0.1, seed=0, class_names=names)
    first, second, *table = shares.report().splitlines()
    assert first == (
        "data.partition dirichlet, alpha 0.1, over 7 classes: 12 replicas of 166 records of their"
        " own, 11 left out;"
    )
    assert f"are {shares.total_variation().mean():.2f} from the whole's in total" in second
    assert table[0].split()[:3] == ["replica", "%", "…rt-0000.jsonl"]
    assert table[-2] == "... and 4 replicas more" and len(table) == 1 + 8 + 1 + 1
    assert max(map(len, table)) <= 120 and len({len(line) for line in table}) == 2
    for line in [*table[1:9], table[-1]]:
        assert sum(map(float, line.split()[1:])) == pytest.approx(100, abs=0.5)
    assert float(table[1].split()[1]) == round(100 * shares.counts[0, 0] / 166, 1)
    summary = json.loads(json.dumps(shares.summary()))
    assert summary["classes"] == 7 and summary["records_per_replica"] == 166
    assert summary["total_variation_iid"] < 0.2 < summary["total_variation_mean"] < 1
    assert len(summary["total_variation"]) == 12 and summary["records_left_out"] == 11


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
    with pytest.raises(DataError, match=r"needs records with labels, which .* lacks; set data"):
        make([1, 2, 3])
    with pytest.raises(DataError, match=r"at least two classes .*, all 9 have the same \(odd\)"):
        make(Labelled(np.ones(9, int)))
    with pytest.raises(DataError, match=r"leaves 3 of 7 records to each of 2 replicas, .* of 4; "):
        make(Labelled(np.arange(7) % 2))


# --- the order they come in -----------------------------------------------------------------------

SOURCE = Labelled(np.arange(103) % 2)


def stream(steps, *, processes=1, shares=None, n=4, **kwargs):
    """(steps, n, B): the records of global batches put together from ``processes``."""
    shares = shares or partition.dirichlet(SOURCE.labels, n, 0.3, seed=0)
    parts = []
    for replicas in np.split(np.arange(n), processes):
        with loader.train_batches(
            SOURCE, num_replicas=n, replicas=replicas, partition=shares, **kwargs
        ) as batches:
            parts.append(np.stack(list(itertools.islice(batches, steps))))
    return np.concatenate(parts, axis=1)


def test_the_same_records_in_any_number_of_processes_from_any_step():
    wanted = stream(30, seed=5, batch_size=12)
    assert wanted.shape == (30, 4, 3)
    for processes in (2, 4):
        got = stream(30, seed=5, batch_size=12, processes=processes)
        np.testing.assert_array_equal(got, wanted)
    got = stream(3, seed=5, batch_size=12, start_step=20, processes=2, prefetch=0)
    np.testing.assert_array_equal(got, wanted[20:23])


def test_each_replica_reads_its_own_records_once_an_epoch():
    shares = partition.dirichlet(SOURCE.labels, 4, 0.3, seed=0)
    batches = stream(25, seed=5, batch_size=12, shares=shares)  # 25 records a replica: 3 epochs
    for replica in range(4):
        epochs = batches[:, replica].reshape(3, 25)
        np.testing.assert_array_equal(np.sort(epochs), np.tile(shares.records(replica), (3, 1)))
        assert len({tuple(epoch) for epoch in epochs}) == 3
    ranks = np.stack([np.searchsorted(shares.records(r), batches[:, r].ravel()) for r in range(4)])
    assert len(set(map(tuple, ranks))) == 4  # each in an order of its own
    assert not np.array_equal(batches, stream(25, seed=6, batch_size=12, shares=shares))


# --- the sources of documents ---------------------------------------------------------------------


def write_folder(path, documents):
    """A prepared folder of (split, source, tokens)."""
    with token_folder.TokenFolderWriter(path, tokenizers.load("bytes")) as writer:
        for split, source, tokens in documents:
            writer.add(split, np.ones(tokens - 1, np.uint16), source)
        return writer.commit()


def test_a_window_is_its_middle_tokens(tmp_path):
    documents = [("train", "a", 9), ("train", "b", 2), ("train", "b", 5), ("val", "c", 9)]
    documents += [("train", "a", 4), ("train", "c", 5)]
    write_folder(tmp_path / "out", documents)
    content = json.loads((tmp_path / "out/sources.json").read_text())
    assert content["names"] == ["a", "b", "c"]
    assert content["splits"] == {"train": [[0, 9], [1, 7], [0, 4], [2, 5]], "val": [[2, 9]]}
    for seq_len in (4, 5):
        windows = token_folder.TokenWindows(tmp_path / "out/train.bin", seq_len)
        assert windows.class_names == ("a", "b", "c") and len(windows.labels) == len(windows)
        tokens = np.repeat([0, 1, 0, 2], [9, 7, 4, 5])
        for i, label in enumerate(windows.labels):
            held = np.bincount(tokens[i * seq_len : (i + 1) * seq_len + 1], minlength=3)
            assert held[label] == held.max()
    assert token_folder.TokenWindows(tmp_path / "out/val.bin", 4).labels.tolist() == [2, 2]


def test_folders_that_do_not_say(tmp_path):
    manifest = write_folder(tmp_path / "new", [("train", "a", 9), ("val", "a", 9)])
    assert manifest["sources"]["file"] == document_sources.FILE
    assert token_folder.is_whole(tmp_path / "new")
    for content, message in (
        ('{"names": ["a"], "splits": {"train": [[0, 8]]}}', r"does not belong to train\.bin"),
        ('{"names": [], "splits": {"train": [[0, 9]]}}', r"does not belong to train\.bin"),
        ('{"names": ["a"]}', r"sources\.json: damaged"),
        ('{"names": "a", "splits": {"train": {"0": 9}}}', r"sources\.json: damaged"),
        ('{"names": ["a"], "splits": {"train": [[-1, 9]]}}', r"does not belong to train\.bin"),
        ("[" * 100_000, r"sources\.json: damaged"),
    ):
        (tmp_path / "new/sources.json").write_text(content)
        with pytest.raises(DataError, match=message):
            _ = token_folder.TokenWindows(tmp_path / "new/train.bin", 4).labels
    (tmp_path / "new/sources.json").unlink()  # as earlier versions made them
    with pytest.raises(DataError, match=r"new: has no sources\.json .* prepare it again with"):
        _ = token_folder.TokenWindows(tmp_path / "new/train.bin", 4).labels
    assert not token_folder.is_whole(tmp_path / "new")


def write_texts(folder):
    """Three sources in two folders, two of the same name: 30 documents of one letter each."""
    for name, letter in (("x/a.jsonl", "a"), ("y/a.jsonl", "b"), ("y/b.txt", "c")):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".txt":
            path.write_text(letter * 70)
        else:
            path.write_text(
                "".join(json.dumps({"text": letter * (20 + i)}) + "\n" for i in range(30))
            )
    return [folder / "x/a.jsonl", folder / "y/a.jsonl", folder / "y/b.txt"]


@pytest.mark.parametrize("workers", [1, 2])
def test_prepare_text_keeps_the_sources(tmp_path, workers):
    inputs = write_texts(tmp_path / "in")
    prepare_text.prepare(inputs, tmp_path / "out", "bytes", val_fraction=0.2, workers=workers)
    for split in token_folder.SPLITS:
        windows = token_folder.TokenWindows(tmp_path / f"out/{split}.bin", 1)
        assert windows.class_names == ("a.jsonl", "a.jsonl (2)", "b.txt")
        text = bytes(int(windows[i][0]) for i in range(len(windows))).decode()
        ends = {"\0"}  # the separator belongs to the document before it
        for name, letter in zip(windows.class_names, "abc", strict=True):
            own = [
                c
                for c, k in zip(text, windows.labels, strict=True)
                if windows.class_names[k] == name
            ]
            assert set(own) <= ends | {letter}
    assert str(tmp_path) not in (tmp_path / "out/sources.json").read_text()


def test_the_standard_librarys_sources_are_packages(tmp_path):
    stdlib_corpus.build(tmp_path / "out")
    windows = token_folder.TokenWindows(tmp_path / "out/train.bin", 64)
    assert {"json", "pydoc_data", "argparse"} <= set(windows.class_names)
    assert not any("/" in name or name.endswith(".py") for name in windows.class_names)
    package = b"".join(path.read_bytes() for path in Path(json.__file__).parent.glob("*.py"))
    own = np.flatnonzero(windows.labels == windows.class_names.index("json"))
    own = [windows[int(i)].astype(np.uint8).tobytes() for i in own]
    own = [text for text in own if b"\0" not in text]  # of one document
    assert len(own) > 100 and all(text in package for text in own)


# --- whole runs -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """A prepared folder of three sources, 400 windows in all."""
    folder = tmp_path_factory.mktemp("sources")
    words = {"a": ["to", "be", "or"], "b": ["not", "that"], "c": ["is", "the", "question"]}
    random = np.random.default_rng(0)
    inputs = []
    for name, known in words.items():
        lines = [" ".join(random.choice(known, 12)) for _ in range(25)]
        inputs.append(folder / f"{name}.jsonl")
        inputs[-1].write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    prepare_text.prepare(inputs, folder / "data", "bytes", val_fraction=0.1)
    return folder / "data"


@pytest.fixture
def run(tmp_path, texts, monkeypatch, compile_once):
    monkeypatch.setattr(plot, "plot_runs", lambda paths: None)

    def run(name, data=None, **changes):
        config = tiny.config(texts, schedule="complete", **changes)  # one round to compile
        config.data.update({"partition": "dirichlet", "alpha": 0.1} | (data or {}))
        return train.run(config, tmp_path / name)

    return run


@pytest.mark.slow
def test_a_run_resumed_elsewhere_and_with_fewer_replicas(run, tmp_path, capfd):
    """4 steps, and as many with a resume on four devices: the same records."""
    summary = run("straight", steps=4, checkpoint={"every": 2})
    said = capfd.readouterr().err
    assert "data.partition dirichlet, alpha 0.1, over 3 classes: 4 replicas of" in said
    assert "  a.jsonl" in said and "\n      all " in said
    assert summary["partition"]["name"] == "dirichlet" and summary["partition"]["classes"] == 3
    assert json.loads((tmp_path / "straight/summary.json").read_text())["partition"]
    own = summary["partition"]["records_per_replica"]

    losses = tiny.losses(tmp_path / "straight")
    small_runs.killed_after(2, tmp_path / "straight", tmp_path / "resumed")
    run("resumed", steps=4, mesh={"devices": 4})
    np.testing.assert_array_equal(tiny.losses(tmp_path / "resumed")[:2], losses[:2])
    np.testing.assert_allclose(tiny.losses(tmp_path / "resumed"), losses, rtol=1e-5)
    fewer = run("resumed", num_replicas=2, steps=5)
    assert fewer["partition"]["records_per_replica"] in (2 * own, 2 * own + 1)


def test_configs_that_cannot_be_run(run, tmp_path, tiny_data):
    old = shutil.copytree(tiny_data, tmp_path / "old")
    (old / "sources.json").unlink()
    for changes, message in (
        ({"data": {"alpha": 0.0}}, "data.alpha must be above 0 and finite, got 0.0"),
        ({"data": {"alpha": -1.0}}, "data.alpha must be above 0 and finite, got -1.0"),
        ({"data": {"partition": "sorted"}}, "data.partition must be one of iid, dirichlet, got"),
        ({"data": {"path": str(old)}}, r"has no sources\.json .*prepare it again with"),
        ({"batch_size": 4000}, r"leaves \d+ of \d+ records to each of 4 replicas, less than a"),
    ):
        with pytest.raises(ConfigError, match=message) as error:
            run("bad", **changes)
        assert "\n" not in str(error.value)
    assert not (tmp_path / "bad/config.json").exists()
    train.validate(tiny.config(tiny_data))  # iid asks for no sources
