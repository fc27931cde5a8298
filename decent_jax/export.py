"""Write the consensus model of a run as one .safetensors file, in its model's published names.

    python -m decent_jax.export --workdir runs/quickstart --out model.safetensors

A GPT-2 is named as in `transformers`, which loads it as ``model.safetensors`` beside the
``config.json`` that is written with it. A ResNet is named as in torchvision, with the batch-norm
statistics it was evaluated with; its ``config.json`` names the architecture, the classes, and how
images are normalised.
"""

import sys
from pathlib import Path

from decent_jax import saved_model
from decent_jax.errors import ConfigError


def main(arguments: list[str] | None = None) -> int:
    """Returns 0, or 2 after one sentence on stderr."""
    parser = saved_model.parser("export", __doc__)
    parser.add_argument("--out", required=True, metavar="FILE.safetensors")
    try:
        path = export(**vars(parser.parse_args(arguments)))
    except (ConfigError, OSError) as error:
        print(f"export: {error}", file=sys.stderr)
        return 2
    print(f"wrote {path} and {path.with_name('config.json')}")
    return 0


def export(workdir: str | Path, out: str | Path, which: str = "last") -> Path:
    """Writes the model, and ``config.json`` beside it; returns its path. See `saved_model.load`."""
    out = Path(out)
    if out.suffix != ".safetensors":
        raise ConfigError(f"--out must end in .safetensors, got {str(out)!r}")
    folder = out.absolute().parent
    if not folder.is_dir():
        raise ConfigError(f"--out: there is no folder {str(folder)!r}")
    if folder.resolve() == Path(workdir).resolve():
        raise ConfigError(
            "--out: a config.json is written beside the model, and in --workdir that is the run's; "
            "name another folder"
        )
    text = saved_model.Run(workdir, which).call("export", "be exported", out)
    out.with_name("config.json").write_text(text)
    return out


if __name__ == "__main__":
    sys.exit(main())
