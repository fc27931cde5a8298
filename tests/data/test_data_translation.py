"""Translation: subwords, sentences of number words, and batches by tokens."""

import hashlib
import json
import pickle
from itertools import islice

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from odd_text import ODD, SAME
from refusals import refuses

from decent_jax.data.translation import number_pairs, subwords
from decent_jax.data.translation.number_pairs import (
    _texts,
    build,
    sentences,
    split_of,
)
from decent_jax.data.translation.pair_batches import TokenBatches
from decent_jax.data.translation.pair_folder import TranslationPairs
from decent_jax.data.translation.subwords import normalize
from decent_jax.ground.errors import DataError


def test_normalize_by_hand():
    assert {text: normalize(text) for text in SAME} == SAME


@given(st.text(st.sampled_from(ODD)))
def test_normalize_twice_is_once(text):
    assert normalize(normalize(text)) == normalize(text)


def test_ids_and_back(tmp_path):
    subwords.train({"new": 30, "words": 20, "Größe": 9, "über": 5}, 290).save(tmp_path)
    vocabulary = subwords.load(tmp_path)
    assert vocabulary.size == 290
    for text in ("", "new words", "<s> </s> <pad> <unk>", "日本 ☃ 🙂", "Größe über 3,5 %"):
        ids = vocabulary.encode(text)
        assert ids.dtype == np.uint16 and (ids >= 4).all()  # nothing is unknown
        assert vocabulary.decode(ids) == vocabulary.decode([2, *ids, 3, 0, 0]) == text
    assert vocabulary.decode(vocabulary.encode("☃")[:-1]).endswith("\ufffd")
    with refuses(290):
        vocabulary.decode([290])
    assert vocabulary.decode(vocabulary.encode("new \udcff\ud83d\ude42")) == "new \ufffd🙂"
    again = pickle.loads(pickle.dumps(vocabulary))
    assert again.sha256 == vocabulary.sha256
    assert again.encode("new").tolist() == vocabulary.encode("new").tolist()


def test_a_vocabulary_is_a_function_of_the_counts():
    words = {f"w{i}x{i % 7}": i % 5 + 1 for i in range(300)}
    model = subwords.train(words, 320).model
    assert subwords.train(dict(reversed(words.items())), 320).model == model
    with refuses("--vocab_size", 3000, error=DataError):
        subwords.train(words, 3000)


# --- numbers in words -----------------------------------------------------------------------------


def test_splits_share_no_number(monkeypatch):
    monkeypatch.setattr(number_pairs, "_TEMPLATES", [lambda draw: draw()])
    for split in number_pairs.SPLITS:
        drawn = [list(islice(sentences(split, seed=seed), 700)) for seed in (4, 4, 5)]
        assert drawn[0] == drawn[1] != drawn[2] and {split_of(n) for n in drawn[0]} == {split}
    shares = [split_of(n) for n in range(20_000)]
    assert 0.03 < shares.count("val") / 20_000 < 0.07 > shares.count("test") / 20_000 > 0.03
    assert set(shares[:100]) == {"train"}


def test_the_quickstarts_sentences_stay_what_they_are():
    """As in the published result; another num2words may spell numbers otherwise."""
    texts = [text for split, n in (("train", 2000), ("val", 500)) for text in _texts(split, n)]
    digest = hashlib.sha256("".join(texts).encode()).hexdigest()
    assert digest == "3722681673910177fcdc629a68ddea0ac740a6ee23609b89f77041f77b7aa5af"


def test_the_quickstarts_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(number_pairs, "_COUNTS", {"train": 800, "val": 30, "test": 30})
    manifest = build(tmp_path / "data")
    train = TranslationPairs(tmp_path / "data", "train")
    assert len(train) == manifest["splits"]["train"]["pairs"] == 800
    assert manifest["vocab_size"] == 400 and not any(manifest["filters"].values())
    before = (tmp_path / "data/manifest.json").stat().st_ino
    assert build(tmp_path / "data") == manifest
    assert (tmp_path / "data/manifest.json").stat().st_ino == before  # found, not made
    (tmp_path / "data/train.ids").write_bytes(b"")
    assert build(tmp_path / "data") == manifest  # made again, the same
    monkeypatch.setattr(number_pairs, "_COUNTS", {"train": 700, "val": 30, "test": 30})
    assert build(tmp_path / "data")["splits"]["train"]["pairs"] == 700
    (tmp_path / "other").mkdir()
    (tmp_path / "other/manifest.json").write_text(json.dumps({"format": "another"}))
    with refuses(tmp_path / "other", error=DataError):
        build(tmp_path / "other")


# --- batches by tokens ----------------------------------------------------------------------------


def like_sentences(count, seed=0):
    """Lengths distributed like those of news, in subwords."""
    rng = np.random.default_rng(seed)
    source = np.exp(rng.normal(3.15, 0.65, count))
    target = source * np.exp(rng.normal(0.05, 0.22, count)) + rng.normal(0, 1, count)
    return np.stack([source, target], 1).round().clip(1, 156).astype(np.uint16)


def blocks_of(batches, epoch):
    """{(step, replica): block} of an epoch."""
    steps = range(epoch * batches.steps_per_epoch, (epoch + 1) * batches.steps_per_epoch)
    return {
        (step, replica): batches.block(step, replica)
        for step in steps
        for replica in range(batches.num_replicas)
    }


def counted_padding(batches, blocks):
    """By looking at every row of every block."""
    room = real = 0
    for (step, _), block in blocks.items():
        shape = batches.shape(step)
        for pair in block:
            room += shape.source + shape.target
            real += batches.lengths[pair].sum(dtype=int) if pair >= 0 else 0
    return 1 - real / room


plans = st.fixed_dictionaries(
    {
        "lengths": st.lists(st.tuples(st.integers(1, 40), st.integers(1, 40)), min_size=1),
        "tokens": st.integers(1, 300),
        "num_replicas": st.integers(1, 9),
        "seed": st.integers(0, 3),
        "shapes": st.integers(1, 6),
        "shuffle": st.booleans(),
    }
)


@settings(deadline=None, max_examples=100)
@given(plans, st.integers(0, 2))
def test_every_pair_once_an_epoch_in_static_shapes(plan, epoch):
    lengths = np.array(plan.pop("lengths"))
    batches = TokenBatches(lengths, **plan)
    blocks = blocks_of(batches, epoch)
    pairs = np.concatenate(list(blocks.values()))
    np.testing.assert_array_equal(np.sort(pairs[pairs >= 0]), np.arange(len(lengths)))
    assert len(batches.shapes) <= plan["shapes"]
    for (step, _), block in blocks.items():
        shape = batches.shape(step)
        assert block.shape == (shape.rows,) and block.dtype == np.int64
        real = block[block >= 0]
        assert (block[: len(real)] >= 0).all()  # empty rows are the last
        assert (lengths[real] <= shape[:2]).all()
        room = plan["num_replicas"] * shape.rows * (shape.source + shape.target)
        assert room <= 2 * plan["tokens"] or shape.rows == 1
        assert len(real) >= shape.rows - 1
    for step in {step for step, _ in blocks}:  # no replica has two pairs more than another
        counts = [(blocks[step, r] >= 0).sum() for r in range(plan["num_replicas"])]
        assert max(counts) - min(counts) <= 1 and max(counts) > 0
    assert batches.padding_fraction == pytest.approx(counted_padding(batches, blocks), abs=1e-12)


@settings(deadline=None, max_examples=40)
@given(plans)
def test_a_block_depends_on_its_address_alone(plan):
    """Resumed, read in another order, by another process, or after other epochs: the same."""
    lengths = np.array(plan.pop("lengths"))
    batches = TokenBatches(lengths, **plan)
    wanted = {address: block for e in range(3) for address, block in blocks_of(batches, e).items()}
    other = pickle.loads(pickle.dumps(TokenBatches(lengths, **plan)))
    for address in reversed(wanted):
        np.testing.assert_array_equal(other.block(*address), wanted[address])


@pytest.mark.parametrize(("num_replicas", "usual"), [(8, 0.003), (32, 0.012)])
def test_replicas_get_nearly_the_same_number_of_tokens(num_replicas, usual):
    lengths = like_sentences(60_000)
    batches = TokenBatches(lengths, tokens=25_000, num_replicas=num_replicas, seed=0)
    spread, totals = [], []
    for step in range(batches.steps_per_epoch):
        blocks = [batches.block(step, r) for r in range(num_replicas)]
        tokens = np.array([lengths[block[block >= 0]].sum(dtype=int) for block in blocks])
        spread.append(np.ptp(tokens) / tokens.mean())
        totals.append(tokens.sum())
    assert np.median(spread) < usual
    assert np.mean(totals) > 0.7 * 50_000
