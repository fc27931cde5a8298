"""Two replicas of three stages each learn Python's own standard library: six workers.

Source: none; the data and the model are those of configs/quickstart.py, with two replicas. Each
stage of a replica is a separate process, which Ray starts; activations travel from stage to stage,
and corresponding stages of the two replicas gossip.

Command: python train.py --config configs/quickstart_pipelines.py --workdir runs/pipelines
Hardware: 2 cores; for comparison: --config.trainer=synchronous --config.pipeline.micro_batches=1
"""

import importlib.util
from pathlib import Path


def get_config():
    path = Path(__file__).with_name("quickstart.py")
    spec = importlib.util.spec_from_file_location("_quickstart", path)
    quickstart = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(quickstart)
    config = quickstart.get_config()
    config.num_replicas = 2
    config.trainer = "pipelines"
    config.pipeline.stages = 3
    config.pipeline.micro_batches = 4
    config.pipeline.order = "1f1b"
    config.pipeline.codec = "bfloat16"
    return config
