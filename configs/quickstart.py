"""Eight replicas that never all-reduce a gradient learn Python's own standard library.

Source: none; a first look that downloads nothing. The corpus is the standard library of the
running interpreter (sources and the prose of ``help()``), as bytes; a 1M-parameter GPT.
"""

from decent_jax import train


def get_config():
    config = train.default_config()
    config.algorithm = "accum_adam"
    config.schedule = "one_peer_exp"
    config.num_replicas = 8
    config.batch_size = 16
    config.steps = 200
    config.learning_rate = 3e-3
    config.lr_schedule.warmup = "10%"
    config.optimizer.weight_decay = 0.1
    config.optimizer.clip_norm = 1.0
    config.data.path = "stdlib"
    config.model.layers = 4
    config.model.heads = 4
    config.model.width = 128
    config.model.context = 128
    config.model.dtype = "float32"
    config.model.bias = False
    config.eval.every = 100
    config.eval.batches = 20
    config.checkpoint.every_minutes = 0.4
    return config
