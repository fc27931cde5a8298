"""What the tests compare with, in ``data/``, whose README names the sources."""

import json
import shutil
from pathlib import Path

DATA = next(path for path in Path(__file__).parents if path.name == "tests") / "data"


def gpt2_files(folder: Path) -> Path:
    """The folder, with GPT-2's two files: tokens are numbered bytes first, then merges in order."""
    path = Path(shutil.copy(DATA / "gpt2_bpe/vocab.bpe", folder))
    merges = path.read_text("utf-8").splitlines()[1:]
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = range(256, 512 - len(printable))  # stand for bytes that are no printable character
    tokens = [chr(code) for code in (*printable, *others)]
    tokens += [line.replace(" ", "") for line in merges] + ["<|endoftext|>"]
    ids = {token: number for number, token in enumerate(tokens)}
    (folder / "encoder.json").write_text(json.dumps(ids))
    return folder
