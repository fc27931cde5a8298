"""Write the consensus model of a run as one .safetensors file, in GPT-2's published names.

    python -m decent_jax.export --workdir runs/quickstart --out model.safetensors

`transformers` loads it as ``model.safetensors`` beside the ``config.json`` that is written with it.
"""

import argparse
import json
import sys
from pathlib import Path

from decent_jax import saved_model
from decent_jax.train import ConfigError


def main(arguments: list[str] | None = None) -> int:
    """0, or 2 with one sentence on stderr."""
    parser = argparse.ArgumentParser(
        prog="python -m decent_jax.export",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    saved_model.add_arguments(parser)
    parser.add_argument("--out", required=True, metavar="FILE.safetensors")
    parsed = parser.parse_args(arguments)
    try:
        path = export(parsed.workdir, parsed.out, parsed.which)
    except (ConfigError, OSError) as error:
        print(f"export: {error}", file=sys.stderr)
        return 2
    print(f"wrote {path} and {path.with_name('config.json')}")
    return 0


def export(workdir: str | Path, out: str | Path, which: str = "last") -> Path:
    """Write the model, and ``config.json`` beside it; returns its path. See `saved_model.load`."""
    from decent_jax.models import gpt2_weights

    out = Path(out)
    if out.suffix != ".safetensors":
        raise ConfigError(f"--out must end in .safetensors, got {str(out)!r}")
    if not out.absolute().parent.is_dir():
        raise ConfigError(f"--out: there is no folder {str(out.absolute().parent)!r}")
    model = saved_model.load(workdir, which)
    about = {"step": str(model.step), "which": which}
    gpt2_weights.save_safetensors(out, model.params, model.config, about)
    beside = json.dumps(gpt2_weights.hf_config(model.config), indent=2)
    out.with_name("config.json").write_text(beside + "\n")
    return out


if __name__ == "__main__":
    sys.exit(main())
