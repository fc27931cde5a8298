"""Write the consensus model of a run as one .safetensors file, in its model's published names.

    python -m decent_jax.export --workdir runs/quickstart --out model.safetensors

A GPT-2 is named as in `transformers`, which loads it as ``model.safetensors`` beside the
``config.json`` that is written with it. A ResNet is named as in torchvision, with the batch-norm
statistics it was evaluated with; its ``config.json`` names the architecture, the classes, and how
images are normalised.
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
    """Write the model, and ``config.json`` beside it; returns its path. See `saved_model`."""
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
    task = saved_model.read_config(workdir).task
    if task not in _WRITERS:
        raise ConfigError(f"{workdir} is a run of the task {task!r}, which cannot be exported")
    beside = _WRITERS[task](out, workdir, which)
    out.with_name("config.json").write_text(beside)
    return out


def _write_gpt2(out: Path, workdir: str | Path, which: str) -> str:
    """Writes ``out``; returns the text of ``config.json``."""
    from decent_jax.models import gpt2_weights

    model = saved_model.load(workdir, which)
    about = {"step": str(model.step), "which": which}
    gpt2_weights.save_safetensors(out, model.params, model.config, about)
    return json.dumps(gpt2_weights.hf_config(model.config), indent=2) + "\n"


def _write_resnet(out: Path, workdir: str | Path, which: str) -> str:
    """Likewise."""
    from decent_jax.models import resnet_weights
    from decent_jax.tasks import image_classification

    model = saved_model.load_image_model(workdir, which)
    data = saved_model.read_config(workdir).data
    size, resize = image_classification.eval_sizes(data)
    generated = data.path == image_classification.GENERATED  # pictures are drawn at their size
    described = resnet_weights.description(
        model.config,
        class_names=model.class_names,
        image_size=data.image_size if generated else size,
        resize=None if generated else resize,
    )
    about = {"step": str(model.step), "which": which}
    resnet_weights.save(
        out, model.params, model.statistics, model.config, step=model.step, metadata=about
    )
    return resnet_weights.dumps(described | {"step": model.step, "which": which})


_WRITERS = {"language_modeling": _write_gpt2, "image_classification": _write_resnet}


if __name__ == "__main__":
    sys.exit(main())
