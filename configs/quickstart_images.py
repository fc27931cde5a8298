"""Eight replicas learn to name shapes in generated pictures without all-reducing a gradient.

Source: none; a first look that downloads nothing. The pictures, ten shapes among clutter at 32
pixels, are generated (``data.path = "generated"``); the model is a ResNet of 8 layers.

Command: python train.py --config configs/quickstart_images.py --workdir runs/images
For comparison: --config.algorithm=all_reduce, the same budget with a synchronized gradient;
--config.model.batch_norm_consensus=recompute, which recomputes the consensus model's statistics.
Hardware and result: 2 cores, 58 s; top-1 95.7% on 2,000 validation pictures (eval/top1).
"""

from decent_jax import train


def get_config():
    config = train.default_config("image_classification")
    config.data.path = "generated"
    config.data.shift = 2

    config.model.preset = "tiny"
    config.model.dtype = "float32"
    config.model.label_smoothing = 0.0

    config.num_replicas = 8
    config.algorithm = "accum_adam"
    config.schedule = "one_peer_exp"
    config.optimizer.accum_steps = 2
    config.batch_size = 64
    config.steps = 600
    config.learning_rate = 6e-3
    config.lr_schedule.warmup = "10%"
    config.optimizer.weight_decay = 0.05

    # vmap over replicas makes grouped convolutions, slow on a CPU
    config.mesh.sequential_replicas = True
    config.log.every = 50
    config.eval.every = 200
    config.checkpoint.every_minutes = 0.4
    return config
