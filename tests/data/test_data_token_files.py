"""Windows of token files, and batches addressed by (step, replica)."""

import gc
import itertools
import json
import pickle
import tempfile
import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import refuses

from decent_jax import train
from decent_jax.data.loader import eval_batches, train_batches
from decent_jax.data.text import token_folder, tokenizers
from decent_jax.data.text.token_folder import TokenFolderWriter, TokenWindows
from decent_jax.ground.errors import ConfigError, DataError
from decent_jax.tasks import language_modeling

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
    return TokenWindows(tokens(50 * SEQ_LEN + 3), SEQ_LEN, "<u2")  # 50 windows


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
    source = TokenWindows(tokens(3 * SEQ_LEN + 1), SEQ_LEN, "<u2")
    assert len(source) == 3 and source.num_tokens == 13
    assert source[0].dtype == np.int32
    np.testing.assert_array_equal(source[0], [0, 1, 2, 3, 4])
    np.testing.assert_array_equal(source[2], [8, 9, 10, 11, 12])
    assert len(TokenWindows(tokens(3 * SEQ_LEN), SEQ_LEN, "<u2")) == 2
    with pytest.raises(IndexError):
        source[3]


def test_shifted_windows_begin_at_every_token_alike(tokens):
    path = tokens(3 * SEQ_LEN + 2)  # 3 windows, and a token more
    source = token_folder.ShiftedWindows(path, SEQ_LEN, "<u2")
    assert len(source) == 3 and pickle.loads(pickle.dumps(source))[1].tolist() == [*range(4, 12)]
    random = np.random.default_rng(0)
    cut = [source.augment(source[i % 3], random) for i in range(3000)]
    assert all(x.dtype == np.int32 and x.tolist() == [*range(x[0], x[0] + 5)] for x in cut)
    counts = np.bincount([x[0] for x in cut])
    assert len(counts) == 3 * SEQ_LEN + 2 - SEQ_LEN  # as many places, the last at the end
    np.testing.assert_allclose(counts[:8], 250, atol=75)  # of 8 standard deviations: 15
    np.testing.assert_allclose(counts[8:], 500, atol=110)  # two windows less a place
    with pytest.raises(IndexError):
        source[3]


@pytest.mark.parametrize("content", [None, b"abc", b"", b"1234567"[:6]])
def test_windows_errors(content, tmp_path):
    path = tmp_path / "bad.bin"
    if content is not None:
        path.write_bytes(content)
    with refuses(path, error=DataError):
        TokenWindows(path, 4, "<u2")


# --- folders that others made: type and vocabulary are found or asked for -------------------------

KINDS = ("<u8", "<i8", "<u4", "<i4", "<u2", "<i2", "u1")


@settings(deadline=None, max_examples=150)
@given(st.sampled_from(KINDS), st.data())
def test_the_type_of_ids_is_found(kind, data):
    """Ids of any vocabulary that the type holds, with some of the largest; or a refusal."""
    vocabulary = data.draw(st.sampled_from([2, 65, 256, 257, 50257, 65536, 65537, 128_256]))
    if np.iinfo(kind).max < vocabulary - 1:
        vocabulary = int(np.iinfo(kind).max) + 1
    ids = np.random.default_rng(data.draw(st.integers(0, 99))).integers(1, vocabulary, 301)
    ids[data.draw(st.lists(st.integers(0, 300), max_size=40))] = 0  # not every id is large
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "train.bin")
        path.write_bytes(ids.astype(kind).tobytes())
        found = token_folder.token_type(path, vocabulary)
        read = TokenWindows(path, 300, found)[0]
        np.testing.assert_array_equal(read, ids)
        if found.itemsize > 1:  # a file that is cut within a token is of no narrower type
            path.write_bytes(path.read_bytes()[: -found.itemsize // 2])
            with pytest.raises(DataError):
                TokenWindows(path, 4, token_folder.token_type(path, vocabulary))
        if vocabulary > 2:  # a vocabulary that is too small for them
            (ids % vocabulary | 1).astype(kind).tofile(path)
            with pytest.raises(DataError):
                token_folder.check_vocab(path, 1)


IDS = np.random.default_rng(0).integers(1, 65, 400)
HEADER = np.zeros(256, "<i4")
HEADER[:3] = 20240520, 1, len(IDS)
NO_IDS = {
    "uint16, big-endian": IDS.astype(">u2").tobytes(),
    "uint32, big-endian": IDS.astype(">u4").tobytes(),
    "int32 with padding": np.append(IDS, -1).astype("<i4").tobytes(),
    "numpy's": b"\x93NUMPY\1\0" + IDS.astype("<u2").tobytes(),
    "git's": b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7\nsize 1234567\n",
    "llm.c's": HEADER.tobytes() + IDS.astype("<u2").tobytes(),
    "megatron's index": b"MMIDIDX\0\0" + bytes(99),
    "a folder": None,
}


@pytest.mark.parametrize("vocabulary", [65, 50257, 65536])
@pytest.mark.parametrize("content", NO_IDS.values(), ids=NO_IDS)
def test_a_file_that_holds_more_than_ids_is_refused(content, vocabulary, tmp_path):
    path = tmp_path / "train.bin"
    path.mkdir() if content is None else path.write_bytes(content)
    if (content, vocabulary) == (NO_IDS["uint16, big-endian"], 65536):
        return  # these are ids, too
    with refuses(path, error=DataError):
        token_folder.token_type(path, vocabulary)


def config_of(folder, **model):
    config = train.default_config()
    config.data.path = str(folder)
    config.model.update(context=8, layers=1, heads=2, width=16, **model)
    return config


def test_a_folder_of_nanogpts(tmp_path):
    """Its characters have a vocabulary of 65; without meta.pkl, the config has to say one."""
    for split in ("train", "val"):
        np.random.default_rng(0).integers(0, 65, 200).astype("<u2").tofile(
            tmp_path / f"{split}.bin"
        )
    with refuses("model.vocab_size", "meta.pkl", error=ConfigError):
        language_modeling.validate(config_of(tmp_path))
    config = config_of(tmp_path, vocab_size=70)
    assert language_modeling.LanguageModeling(config, tmp_path).config.vocab_size == 70
    meta = tmp_path / "meta.pkl"
    meta.write_bytes(pickle.dumps({"vocab_size": 65, "stoi": {"a": 0}, "itos": {0: "a"}}))
    task = language_modeling.LanguageModeling(config_of(tmp_path), tmp_path)
    assert task.config.vocab_size == 65 and task.summary()["tokenizer"] == "unknown"
    with refuses("model.vocab_size", 65, 64, error=ConfigError):
        language_modeling.validate(config_of(tmp_path, vocab_size=64))
    sizes = (pickle.dumps({"vocab_size": x}) for x in (print, 65.5, "65", True, 0, -5, 2**63))
    for bad in (b"", b"no pickle", pickle.dumps([1]), *sizes):
        meta.write_bytes(bad)
        with refuses(meta, error=ConfigError):
            language_modeling.validate(config_of(tmp_path))
    meta.write_bytes(pickle.dumps({"vocab_size": 60}))
    with refuses("train.bin", 60, error=ConfigError):
        language_modeling.validate(config_of(tmp_path))


def test_a_prompt_in_another_encoding_is_refused(tmp_path):
    config = config_of(tmp_path)
    config.data.prompt = "a \udcff b"
    with refuses("data.prompt", "UTF-8", error=ConfigError):
        language_modeling.validate(config)
    with refuses("--prompt", "UTF-8", error=ConfigError):
        language_modeling.sample(None, prompt="a \udcff b")


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
    other = stream(source, 4, seed=1, num_replicas=1, batch_size=50)[:, 0, :, 0] // SEQ_LEN
    assert not {*map(tuple, epochs)} & {*map(tuple, other)}  # no seed is a shift of another


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
