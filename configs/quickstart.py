"""Eight replicas learn Python's own standard library without all-reducing a gradient.

Source: none; a first look that downloads nothing. The corpus is the standard library of the
running interpreter (sources and the texts of ``help()``) as bytes, split by file. The model is a
GPT of 0.17M parameters, small enough for 3,000 steps on two cores.

Command: python train.py --config configs/quickstart.py --workdir runs/quickstart
For comparison: --config.algorithm=all_reduce, the same budget with a synchronized gradient.
Hardware, time and result: see docs/results.md.
"""

from decent_jax import train


def get_config():
    config = train.default_config("language_modeling")
    config.data.path = "stdlib"
    config.data.prompt = "import "

    config.model.layers = 3
    config.model.heads = 2
    config.model.width = 64
    config.model.context = 64
    config.model.bias = False
    config.model.dtype = "float32"
    config.model.init_std = 0.12

    config.num_replicas = 8
    config.algorithm = "accum_adam"
    config.schedule = "one_peer_exp"
    config.optimizer.accum_steps = 4
    config.batch_size = 16
    config.steps = 3000
    config.learning_rate = 8e-3
    config.lr_schedule.warmup = "10%"
    config.optimizer.b1 = 0.8
    config.optimizer.b2 = 0.97
    config.optimizer.weight_decay = 0.1
    config.optimizer.clip_norm = 1.0

    config.mesh.sequential_replicas = True  # faster than vmap on a CPU
    config.log.every = 50
    config.eval.every = 1000
    config.checkpoint.every_minutes = 0.4
    return config
