"""Subwords: a canonical spelling, ids and back, a vocabulary from counts alone."""

import pickle

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from refusals import refuses

from decent_jax.data.translation import subwords
from decent_jax.data.translation.subwords import normalise
from decent_jax.ground.errors import DataError

SAME = {
    "  a \t b\u00a0c\u3000d  ": "a b c d",
    "\ufeff\u201eso\u201c \u201aund\u2018 \u2019s": "\"so\" 'und' 's",
    "``x''": '"x"',
    "a\u2010b\u2011c\u2212d\u2014e\u2013f": "a-b-c-d\u2013e\u2013f",
    "\ufb01ne \u00bd … \uff21\uff22": "fine 1\u20442 ... AB",
    "cafe\u0301 so\u00adft z\u200bw\0": "café soft zw",
    "«oui»": "«oui»",
    "line\u2028sep\x85x\r": "line sep x",
    "a\u2581b": "a b",
    "\u00b4`": '"',
}
ODD = "aé'\" \n\u0301\u0338\u1100\u1161\ufe58\ufe63\u2033\u2057\u00a8\U0001f642"
ODD = sorted({*"".join(SAME), *ODD})


def test_normalise_by_hand():
    assert {text: normalise(text) for text in SAME} == SAME


@given(st.text(st.sampled_from(ODD)))
def test_normalise_twice_is_once(text):
    assert normalise(normalise(text)) == normalise(text)


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
    again = pickle.loads(pickle.dumps(vocabulary))
    assert again.sha256 == vocabulary.sha256
    assert again.encode("new").tolist() == vocabulary.encode("new").tolist()


def test_a_vocabulary_is_a_function_of_the_counts():
    words = {f"w{i}x{i % 7}": i % 5 + 1 for i in range(300)}
    model = subwords.train(words, 320).model
    assert subwords.train(dict(reversed(words.items())), 320).model == model
    with refuses("--vocab_size", 3000, error=DataError):
        subwords.train(words, 3000)
