"""Windows of token files, and batches addressed by (step, replica)."""

import gc
import itertools
import json
import threading

import numpy as np
import pytest
from refusals import refuses

from decent_jax.data.loader import eval_batches, steps_per_epoch, train_batches
from decent_jax.data.text import token_folder, tokenizers
from decent_jax.data.text.token_folder import TokenFolderWriter, TokenWindows
from decent_jax.ground.errors import DataError

SEQ_LEN = 4


@pytest.fixture
def tokens(tmp_path):
    def make(count):
        path = tmp_path / "tokens.bin"
        np.arange(count).astype("<u2").tofile(path)
        return path

    return make


@pytest.fixture
def source(tokens):
    return TokenWindows(tokens(50 * SEQ_LEN + 3), SEQ_LEN)  # 50 windows


def shares(num_replicas, processes):
    """The replicas of every process."""
    return np.split(np.arange(num_replicas), processes)


def stream(source, steps, **kwargs):
    """Global batches (steps, n, B, ...) put together from ``processes``."""
    parts = []
    for replicas in shares(kwargs["num_replicas"], kwargs.pop("processes", 1)):
        with train_batches(source, replicas=replicas, **kwargs) as batches:
            parts.append(list(itertools.islice(batches, steps)))
    blocks = [np.concatenate(step, axis=0) for step in zip(*parts, strict=True)]
    return np.stack(blocks)


def test_windows(tokens):
    source = TokenWindows(tokens(3 * SEQ_LEN + 1), SEQ_LEN)
    assert len(source) == 3 and source.num_tokens == 13
    assert source[0].dtype == np.int32
    np.testing.assert_array_equal(source[0], [0, 1, 2, 3, 4])
    np.testing.assert_array_equal(source[2], [8, 9, 10, 11, 12])
    assert len(TokenWindows(tokens(3 * SEQ_LEN), SEQ_LEN)) == 2
    with pytest.raises(IndexError):
        source[3]


@pytest.mark.parametrize("content", [None, b"abc", b"", b"1234567"[:6]])
def test_windows_errors(content, tmp_path):
    path = tmp_path / "bad.bin"
    if content is not None:
        path.write_bytes(content)
    with refuses(path, error=DataError):
        TokenWindows(path, 4)


def test_check_vocab(tmp_path, tokens):
    path = tokens(100)
    token_folder.check_vocab(path, 100)
    with refuses(path, 99, error=DataError):
        token_folder.check_vocab(path, 99)
    with TokenFolderWriter(tmp_path / "out", tokenizers.load("bytes")) as writer:
        writer.add("train", np.array([200, 7], np.uint16))
        writer.add("val", np.array([9], np.uint16))
        writer.commit()
    token_folder.check_vocab(tmp_path / "out/val.bin", 10)
    with refuses(200, error=DataError):
        token_folder.check_vocab(tmp_path / "out/train.bin", 200)
    manifest = tmp_path / "out/manifest.json"
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"splits": "none"}))
    with refuses(200, error=DataError):  # the file itself is read
        token_folder.check_vocab(tmp_path / "out/train.bin", 200)


def test_same_records_for_any_layout(source):
    wanted = stream(source, 7, seed=3, num_replicas=1, batch_size=8)
    assert wanted.shape == (7, 1, 8, SEQ_LEN + 1) and wanted.dtype == np.int32
    for n in (1, 2, 4, 8):
        for processes in (1, 2, 4, 8):
            if n % processes:
                continue
            got = stream(source, 7, seed=3, num_replicas=n, batch_size=8, processes=processes)
            assert got.shape == (7, n, 8 // n, SEQ_LEN + 1)
            np.testing.assert_array_equal(got.reshape(wanted.shape), wanted)
    with train_batches(source, replicas=[3, 0], seed=3, num_replicas=4, batch_size=8) as batches:
        for step in wanted:  # in any order
            np.testing.assert_array_equal(next(batches), step.reshape(4, 2, -1)[[3, 0]])


@pytest.mark.parametrize("start", [1, 6, 40])
def test_seek_equals_replay(source, start):
    settings = {"seed": 1, "num_replicas": 4, "batch_size": 8, "processes": 2}
    replayed = stream(source, start + 3, **settings)[start:]
    np.testing.assert_array_equal(stream(source, 3, start_step=start, **settings), replayed)


def test_every_record_once_an_epoch_and_reshuffled(source):
    # 50 records in batches of 8: epochs end inside a batch
    order = stream(source, 25, seed=0, num_replicas=2, batch_size=8).reshape(-1, SEQ_LEN + 1)
    windows = order[:, 0] // SEQ_LEN
    epochs = windows.reshape(4, 50)
    np.testing.assert_array_equal(np.sort(epochs), np.tile(np.arange(50), (4, 1)))
    assert len({tuple(epoch) for epoch in epochs}) == 4
    assert not np.array_equal(epochs[0], np.arange(50))


def test_seeds_are_not_shifts_of_each_other(source):
    def order(seed):
        return stream(source, 10, seed=seed, num_replicas=1, batch_size=50)[:, 0, :, 0]

    assert not set(map(tuple, order(0))) & set(map(tuple, order(1)))


def test_records_may_be_trees():
    records = [{"image": np.full((2, 2), i, np.uint8), "label": np.int32(i)} for i in range(6)]
    with train_batches(records, seed=0, num_replicas=2, batch_size=6) as batches:
        batch = next(batches)
    assert batch["image"].shape == (2, 3, 2, 2) and batch["label"].shape == (2, 3)
    assert sorted(batch["label"].ravel().tolist()) == list(range(6))
    ((batch, weights),) = eval_batches(records[:5], num_replicas=2, batch_size=6)
    np.testing.assert_array_equal(batch["label"], [[0, 1, 2], [3, 4, 0]])
    np.testing.assert_array_equal(weights, [[1, 1, 1], [1, 1, 0]])
    assert batch["image"].dtype == np.uint8 and weights.dtype == np.float32


@pytest.mark.parametrize("batch_size", [8, 16, 64])
def test_eval_covers_everything_once_in_order(source, batch_size):
    for n, processes in ((1, 1), (2, 1), (2, 2), (4, 4), (8, 1), (8, 4)):
        options = {"num_replicas": n, "batch_size": batch_size}
        parts = [list(eval_batches(source, replicas=r, **options)) for r in shares(n, processes)]
        steps = [
            [np.concatenate(x) for x in zip(*step, strict=True)]
            for step in zip(*parts, strict=True)
        ]
        assert len(steps) == -(-50 // batch_size)
        tokens = np.concatenate([t.reshape(-1, SEQ_LEN + 1) for t, _ in steps])
        weights = np.concatenate([w.ravel() for _, w in steps])
        assert steps[0][0].shape == (n, batch_size // n, SEQ_LEN + 1)
        assert tokens.dtype == np.int32 and weights.dtype == np.float32
        assert set(weights.tolist()) <= {0.0, 1.0} and weights.sum() == 50
        np.testing.assert_array_equal(tokens[weights > 0, 0], np.arange(50) * SEQ_LEN)


def test_as_many_batches_as_there_are(source):
    for most, wanted in ((3, 3), (99, 7)):
        batches = eval_batches(source, num_replicas=2, batch_size=8, max_batches=most)
        assert len(list(batches)) == wanted
    assert [steps_per_epoch(source, size) for size in (50, 8)] == [1, 7]


def test_close_stops_the_threads(source):
    batches = train_batches(source, seed=0, num_replicas=1, batch_size=4, prefetch=3)
    next(batches)
    ours = [t for t in threading.enumerate() if t.name.startswith("grain-prefetch")]
    assert ours
    batches.close()
    batches.close()
    for thread in ours:
        thread.join(10)
        assert not thread.is_alive()
    with refuses("closed"):
        next(batches)
    del batches
    gc.collect()
