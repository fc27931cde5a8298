"""Runs of two replicas on one device, of any task, and what a kill leaves of one."""

import shutil
from pathlib import Path

from decent_jax import train

# A ResNet of one block.
RESNET = {"model__preset": "tiny", "model__blocks": "1", "model__width": 4}
RESNET |= {"model__dtype": "float32", "data__image_size": 16}


def config(task, **changes):
    """2 replicas for 4 steps; ``section__name`` changes a field of a section."""
    result = train.default_config(task)
    result.update(num_replicas=2, batch_size=8, steps=4)
    result.lr_schedule.update(name="constant", warmup=1)
    result.mesh.devices = 1
    result.eval.every = 0
    result.checkpoint.every_minutes = 0.0
    result.log.every = 1
    for name, value in changes.items():
        section, _, key = name.rpartition("__")
        (result[section] if section else result)[key] = value
    return result


def killed_after(step: int, folder: Path, copy: Path) -> Path:
    """A copy of a run's folder as a kill behind the checkpoint of ``step`` would have left it."""
    shutil.copytree(folder, copy)
    for path in copy.glob("checkpoints/[0-9]*"):
        if int(path.name) > step:
            shutil.rmtree(path)
    shutil.rmtree(copy / "best")
    (copy / "summary.json").unlink()
    return copy
