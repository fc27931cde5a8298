"""Cached executables are those of the code that is there."""

import importlib
import os
import shutil
import sys

import jax

from decent_jax.checkpoints.executables import ExecutableCache, version


class Code:
    """A model, and a layer that it imports while it is traced, in files."""

    def __init__(self, folder):
        self.folder = folder
        self.write("edited_model", "from importlib import import_module\ndef apply(x):\n"
                   "    return import_module('edited_layer').apply(1 * x)")  # fmt: skip
        self.write("edited_layer", "def apply(x):\n    return 10 * x")
        self.traced = []

    def write(self, name, text):
        (self.folder / f"{name}.py").write_text(text)

    def edit(self, name, before, after):
        """As if nothing had been: of the same size and age."""
        path = self.folder / f"{name}.py"
        stat, text = path.stat(), path.read_text()
        assert text.count(before) == 1
        path.write_text(text.replace(before, after))
        os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))

    def start(self):
        """A process that has imported the model, and its cached executables."""
        version.cache_clear()
        importlib.invalidate_caches()
        shutil.rmtree(self.folder / "__pycache__", ignore_errors=True)
        for name in ("edited_model", "edited_layer"):
            sys.modules.pop(name, None)
        model = importlib.import_module("edited_model")

        def compiled():
            self.traced.append(None)
            return jax.jit(lambda x: model.apply(x)).lower(1.0).compile()

        cache = ExecutableCache(self.folder, devices=jax.devices()[:1])
        return lambda: float(cache.get("model", compiled)(1.0))


def test_a_program_is_that_of_the_code_which_is_there(tmp_path, monkeypatch, supervised):
    """Also after an edit of what the model imports, or one that a process lived to see."""
    monkeypatch.syspath_prepend(tmp_path)
    code = Code(tmp_path)
    assert [code.start()(), code.start()(), len(code.traced)] == [10, 10, 1]
    code.edit("edited_model", "1 *", "2 *")
    assert [code.start()(), code.start()(), len(code.traced)] == [20, 20, 2]
    code.edit("edited_layer", "10 *", "30 *")
    assert [code.start()(), code.start()(), len(code.traced)] == [60, 60, 3]
    code.edit("edited_model", "2 *", "1 *")
    older = code.start()
    older()
    (program,) = tmp_path.glob("*.executable")
    program.unlink()
    code.edit("edited_model", "1 *", "3 *")
    assert older() == 30
    assert code.start()() == 90
