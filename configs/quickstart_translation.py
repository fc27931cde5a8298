"""Eight replicas learn to translate numbers spelled out in English into German, by gossip.

Source: none; a first look that downloads nothing. The pairs are made by a grammar
(``decent_jax/data/translation/number_words.py``); numbers of the validation set are not in the
training set.

Command: python train.py --config configs/quickstart_translation.py --workdir runs/numbers
Then: echo "twenty-one thousand and seven" | python -m decent_jax.translate --workdir runs/numbers
Hardware and result: 2 cores; 2 min 22 s, of which 47 s compile (kept for the next start); BLEU 98.0
on unseen numbers.
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
    config.accum_steps = 2
    config.batch_size = 4096
    config.steps = 450
    config.learning_rate = 4e-3
    config.lr_schedule.warmup = "10%"

    config.log.every = 25
    config.eval.every = 225
    config.checkpoint.every_minutes = 0.4
    return config
