"""Eight replicas learn by gossip to translate numbers from English to German words.

Source: none; a first look that downloads nothing. A grammar generates the pairs
(``data.path = "numbers"``); no number of the validation set is in the training set.

Command: python train.py --config configs/quickstart_translation.py --workdir runs/numbers
Then: echo "twenty-one thousand and seven" | decent-jax translate --workdir runs/numbers
Hardware and result: 2 cores; 2 minutes, less on the second start, which reuses the compiled
programs; BLEU 96.6 on unseen numbers.
"""

from decent_jax import train


def get_config():
    config = train.default_config("translation")
    config.data.path = "numbers"
    config.data.shapes = 2

    config.model.preset = "tiny"
    config.model.norm = "pre"
    config.model.dtype = "float32"
    config.model.dropout = 0.0
    config.model.label_smoothing = 0.0

    config.num_replicas = 8
    config.algorithm = "accum_adam"
    config.schedule = "one_peer_exp"
    config.optimizer.accum_steps = 2
    config.batch_size = 4096
    config.steps = 450
    config.learning_rate = 4e-3
    config.lr_schedule.warmup = "10%"

    config.mesh.sequential_replicas = True  # takes 0.6 times as long as vmap on a CPU
    config.log.every = 25
    config.eval.every = 225
    config.checkpoint.every_minutes = 0.4
    return config
