"""What the tests compare with, in ``data/``, whose README names the sources."""

from pathlib import Path

import tokenizers

DATA = next(path for path in Path(__file__).parents if path.name == "tests") / "data"


def gpt2_json(folder: Path) -> Path:
    """GPT-2's tokenizer.json: tokens are numbered bytes first, then merges in order."""
    lines = (DATA / "gpt2_bpe/vocab.bpe").read_text().splitlines()[1:]
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = range(256, 512 - len(printable))  # stand for bytes that are no printable character
    tokens = [chr(code) for code in (*printable, *others)]
    tokens += [line.replace(" ", "") for line in lines] + ["<|endoftext|>"]
    ids = {token: number for number, token in enumerate(tokens)}
    made = tokenizers.Tokenizer(tokenizers.models.BPE(ids, [(*line.split(),) for line in lines]))
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    made.add_special_tokens(["<|endoftext|>"])
    made.save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"
