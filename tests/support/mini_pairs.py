"""Sentence pairs as files: a few hundred for training, some for validation and the test."""

import gzip
import itertools

from decent_jax.data.translation import number_pairs

SIZES = {"europarl": 160, "commoncrawl": 80, "nc": 60, "dev": 20, "test": 24}


def pairs(part):
    """[(English, German), ...] of a part of ``SIZES``."""
    split = {"dev": "val", "test": "test"}.get(part, "train")
    seed = list(SIZES).index(part)
    found = itertools.islice(number_pairs.sentences(split, seed=seed), SIZES[part])
    return [(f"{en} & “so on”", f"{de} & „so weiter“") for en, de in found]


def training_pairs():
    return [pair for part in ("europarl", "commoncrawl", "nc") for pair in pairs(part)]


def write_files(folder, end=".gz"):
    """train.en.gz, train.de.gz, valid.en.gz and so on."""
    folder.mkdir(parents=True)
    splits = {"train": training_pairs(), "valid": pairs("dev"), "test": pairs("test")}
    for name, found in splits.items():
        for lang, side in zip(("en", "de"), zip(*found, strict=True), strict=True):
            data = _lines(side)
            path = folder / f"{name}.{lang}{end}"
            path.write_bytes(gzip.compress(data) if end else data)
    return folder


def write_pairs(prefix, found):
    """PREFIX.en and PREFIX.de."""
    for lang, side in zip(("en", "de"), zip(*found, strict=True), strict=True):
        prefix.with_name(f"{prefix.name}.{lang}").write_bytes(_lines(side))
    return prefix


def _lines(sentences):
    return "".join(f"{sentence}\n" for sentence in sentences).encode()
