"""A task that raises in one of its parts."""

from dataclasses import dataclass

import line_task

from decent_jax.ground.fields import setting

PARTS = ("validate", "make", "init", "load_params", "loss", "evaluate", "decay_mask", "summary")
PARTS += ("demonstrate", "measure", "score", "test", "record", "len")
Data, load, export = line_task.Data, line_task.load, line_task.export


@dataclass(frozen=True)
class Model(line_task.Model):
    """Of the line."""

    raises: str = setting("", "part")


def validate(config):
    _raise(config.model.raises == "validate")


def make(config, workdir, announce):
    _raise(config.model.raises == "make")
    return Raising(config)


def _raise(wanted):
    if wanted:
        raise KeyError("of the task")


class Points(line_task.Points):
    """A record, or their number, that cannot be had."""

    def __init__(self, count, raises):
        super().__init__(count)
        self.raises = raises

    def __len__(self):
        _raise(self.raises == "len")
        return self.count

    def __getitem__(self, index):
        _raise(self.raises == "record")
        return super().__getitem__(index)


class Raising(line_task.Line):
    """See `decent_jax.tasks.Task`."""

    def __init__(self, config):
        super().__init__(config)
        part = config.model.raises
        self.train_source = self.eval_source = Points(config.data.points, part)
        if part not in ("", "validate", "make", "record", "len"):
            setattr(self, part, lambda *_, **__: _raise(True))


def translator(run, beam):
    """Says a sentence in capitals, except "late"."""

    def translate(sentences):
        _raise("late" in sentences)
        return [sentence.upper() for sentence in sentences]

    return translate
