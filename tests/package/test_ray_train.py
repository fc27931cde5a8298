"""The program of docs/trainers.md for Ray Train, on two CPU processes."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("ray.train", reason="pip install 'ray[train]'", exc_type=ImportError)

ROOT = Path(__file__).resolve().parents[2]
# As in the program's last lines, but that the devices are CPUs.
DRIVER = """
import json

import ray
from gossip_on_ray import train_on_worker
from ray import train
from ray.train.v2.jax import JaxConfig, JaxTrainer

if __name__ == "__main__":
    ray.init(address="local", num_cpus=2, include_dashboard=False)
    trainer = JaxTrainer(
        train_on_worker,
        train_loop_config={"steps": 100},
        scaling_config=train.ScalingConfig(num_workers=2),
        jax_config=JaxConfig(use_tpu=True),
        run_config=train.RunConfig(storage_path=FOLDER),
    )
    with open(FOLDER + ".json", "w") as file:
        json.dump(trainer.fit().return_value, file)
"""


@pytest.mark.slow
def test_gossip_in_the_workers_of_ray_train(tmp_path):
    page = (ROOT / "docs" / "trainers.md").read_text()
    (program,) = re.findall(r'title="gossip_on_ray.py"\n(.*?)```', page, re.DOTALL)
    assert len(program.splitlines()) <= 40
    (tmp_path / "gossip_on_ray.py").write_text(program)
    driver = tmp_path / "driver.py"
    driver.write_text(DRIVER.replace("FOLDER", repr(str(tmp_path / "storage"))))
    own = {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1", "RAY_TRAIN_V2_ENABLED": "1"}
    own["PYTHONPATH"] = os.pathsep.join(map(str, (tmp_path, ROOT)))
    done = subprocess.run(
        [sys.executable, driver], env=os.environ | own, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads((tmp_path / "storage.json").read_text())
    assert found["replicas"] == 2
    assert found["loss"] < 0.1  # 0.5 before the first step
