"""Facts by which processes and sessions of a run find out that they read the same data."""

import contextlib
import itertools
import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import tiny
from ml_collections import ConfigDict
from PIL import Image

from decent_jax import tasks, train
from decent_jax.train.config import parse
from decent_jax.train.same_data import facts_of


@pytest.mark.parametrize("path", ["", "stdlib", "empty", "a file", "a file/below", "prepared"])
def test_facts_of_data_that_no_folder_or_an_unprepared_one_holds(path, tmp_path, monkeypatch):
    """Python's own library has no folder when they are compared."""
    monkeypatch.chdir(tmp_path)
    Path("empty").mkdir()
    Path("a file").touch()
    Path("prepared").mkdir()
    Path("prepared/manifest.json").write_text('{"splits": {"train": 1}}')
    task = SimpleNamespace(train_source=range(4), eval_source=range(2))
    found = facts_of(ConfigDict({"data": {"path": path}}), task)
    assert found["the training data"] == "4 records" and found["some of the records"]
    assert ("the manifest of data.path" in found) == (path == "prepared")


def test_other_records_of_the_same_number_are_other_data():
    """Unless a source gives another record at each look, or none."""

    def facts(source):
        task = SimpleNamespace(train_source=source, eval_source=[])
        return facts_of(ConfigDict({"data": {}}), task)

    def dicts(last):
        return [{"x": np.arange(3), "y": np.int8(k)} for k in (0, 1, last)]

    class Raises(list):
        def __getitem__(self, index):
            raise KeyError(index)

    class Draws(list):
        def __getitem__(self, index):
            return np.random.default_rng().normal(size=3)

    pairs = ([1, 2, 3], [1, 2, 4]), ([b"a", b"b"], [b"c", b"b"]), (dicts(2), dicts(3)), ([], [0])
    pairs += (([("jpeg", 0, "a")], [("jpeg", 1, "a")]),)
    for one, other in pairs:
        assert facts(one) == facts(list(one)) != facts(other)
    for source in (Raises([0]), Draws([0]), [object()], [{"x": np.array([object()])}]):
        assert "some of the records" not in facts(source)


def _one_bit(path, where=0.3):
    data = bytearray(path.read_bytes())
    data[int(where * (len(data) - 1))] ^= 1
    path.write_bytes(data)


def _manifest(at, edit):
    """Edited, and in another order and layout."""
    entries = json.loads((at / "manifest.json").read_text())
    edit(entries)
    (at / "manifest.json").write_text(json.dumps(dict(reversed(entries.items())), indent=7))


def _rename_class(at):
    for split in ("train", "val"):
        (at / split / "b").rename(at / split / "bb")


SAME = {
    "the time": lambda at: os.utime(at / "train.bin", (1, 1)),
    "other versions": lambda at: _manifest(at, lambda entries: entries.pop("versions")),
    "a note": lambda at: (at / "notes.txt").touch(),
    "pictures: a hidden file": lambda at: (at / "train/a/.DS_Store").touch(),
    "pictures: listed in another order": lambda at: None,
}
OTHER = {
    "a bit": lambda at: _one_bit(at / "train.bin"),
    "a bit of validation": lambda at: _one_bit(at / "val.bin"),
    "the last bit": lambda at: _one_bit(at / "val.bin", 1),
    "a bit, without a manifest": lambda at: _one_bit(at / "train.bin"),
    "the end": lambda at: _manifest(at, lambda x: x["tokenizer"].update(end_of_text=3)),
    "pictures: one replaced": lambda at: shutil.copy(at / "train/a/1.png", at / "train/a/2.png"),
    "pictures: of validation": lambda at: shutil.copy(at / "val/a/1.png", at / "val/a/2.png"),
    "pictures: one renamed": lambda at: (at / "train/a/2.png").rename(at / "train/a/3.png"),
    "pictures: a class renamed": _rename_class,
}


class Reversed(list):
    """The entries of a folder as another file system lists them."""

    __enter__ = __iter__ = lambda self: self

    def __exit__(self, *_):
        pass

    def __next__(self):
        if self:
            return self.pop()
        raise StopIteration


@pytest.mark.parametrize("change", SAME | OTHER)
def test_what_makes_other_data_of_as_many_records(change, tiny_data, tmp_path, monkeypatch):
    here = tmp_path / "here"
    if "pictures" in change:
        config = train.default_config("image_classification")
        for number, at in enumerate(itertools.product(("train", "val"), "abc", "01245")):
            path = here.joinpath(*at).with_suffix(".png")
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(np.full((8, 8, 3), number, np.uint8)).save(path)
    else:
        config = tiny.config("", model={"vocab_size": 257})
        shutil.copytree(tiny_data, here)
        if "without" in change:
            (here / "manifest.json").unlink()

    def facts(path):
        config.data.path = path
        parsed = parse(config)
        task = tasks.find(config.task).make(parsed, tmp_path, contextlib.nullcontext)
        return facts_of(parsed, task)

    before, scan = facts(str(here)), os.scandir
    if "listed" in change:
        monkeypatch.setattr(os, "scandir", lambda at: Reversed(scan(at)))
    (SAME | OTHER)[change](here)
    assert (facts(f"{here}/") == before) == (change in SAME)
