"""Write the consensus model of a run as one .safetensors file, with the published array names.

    decent-jax export --workdir runs/quickstart --out model.safetensors

The arrays of a GPT-2 or Llama are named as in `transformers`, which loads ``model.safetensors``
with the ``config.json`` written next to it. A translation Transformer is saved as a Marian model,
or as a Pegasus if its LayerNorms come first. The arrays of a ResNet are named as in torchvision and
include the batch-norm statistics used for evaluation; its ``config.json`` holds the architecture,
the classes, and the normalization of images.
"""

import re
from pathlib import Path

from decent_jax.ground.command_line import check_replaceable, command, model_parser
from decent_jax.ground.errors import ConfigError
from decent_jax.ground.json_files import write_atomic
from decent_jax.train.saved_model import TrainedRun

_EXPORTED = re.compile(rb'.{8}\{"__metadata__".{,65536}"which"', re.DOTALL)
# Files that an export may write next to the weights.
_BESIDE = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")
_BESIDE += ("vocab.json", "merges.txt")


@command("export")
def main(arguments: list[str] | None = None) -> int:
    """Run the command; returns its exit code: 0, or 2 after one sentence on stderr."""
    parser = model_parser("export", __doc__)
    parser.add_argument("--out", required=True, metavar="FILE.safetensors", help="file to write")
    path = export(**vars(parser.parse_args(arguments)))
    print(f"wrote {path} and {path.with_name('config.json')}")
    return 0


def export(workdir: str | Path, out: str | Path, which: str = "last") -> Path:
    """Write the model of a run and its ``config.json``; returns the path of the model.

    Args:
      workdir: the run directory.
      out: the .safetensors file to write.
      which: see `decent_jax.train.saved_model.load`.

    Raises:
      ConfigError: the model cannot be exported, or would replace a file that no export has written.
    """
    out = Path(out)
    if out.suffix != ".safetensors":
        raise ConfigError.about("--out", str(out), "must end in .safetensors")
    folder = out.absolute().parent
    if folder.resolve() == Path(workdir).resolve() or (folder / "metrics.jsonl").exists():
        raise ConfigError(
            f"--out: {folder} is the folder of a run, whose config.json would be lost; name "
            "another folder"
        )
    _check_replaceable(out)
    run = TrainedRun(workdir, which)
    run.function("export", "be exported")  # refused before the folder is created
    folder.mkdir(parents=True, exist_ok=True)
    text = run.call("export", "be exported", out)
    write_atomic(out.with_name("config.json"), text.encode())
    return out


def _check_replaceable(out: Path) -> None:
    """Raise ConfigError if the export would replace a file that no export has written."""
    check_replaceable(out, "--out", _EXPORTED)
    again = out.exists() and out.stat().st_size > 0  # then an earlier export wrote the others, too
    for path in (out.with_name(name) for name in _BESIDE):
        if path.is_symlink() or (path.exists() and not again):
            why = f"must be in another folder: no export has written the {path.name} there"
            raise ConfigError.about("--out", out, why)
