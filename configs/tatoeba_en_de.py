"""A small Transformer on 165,000 short English-German pairs, by gossip and by all-reduce.

Source: pairs of https://tatoeba.org (CC BY 2.0 FR), prepared with a joint vocabulary of 2000
subwords:
    decent-jax prepare translation --input TATOEBA --source_lang en --target_lang de \\
        --vocab_size 2000 --out data/tatoeba_en_de

Command: python train.py --config configs/tatoeba_en_de.py:accum_adam --workdir runs/tatoeba
After the colon comes one of all_reduce, accum_adam (one_peer_exp), accum_adam_ring
(alternating_exp_ring on nodes of 2) and accum_adam_complete.

Hardware: one core for 65 minutes, measured without mesh.sequential_replicas. Result: a test BLEU of
30.3 with all_reduce, 30.1 with accum_adam, 30.8 with accum_adam_ring and 31.0 with
accum_adam_complete (one seed; see docs/translation.md).
"""

from decent_jax import train

ARMS = {  # arm: its schedule
    "all_reduce": "one_peer_exp",  # not used
    "accum_adam": "one_peer_exp",
    "accum_adam_ring": "alternating_exp_ring",
    "accum_adam_complete": "complete",
}


def get_config(arm: str = "accum_adam"):
    if arm not in ARMS:
        raise train.ConfigError(f"tatoeba_en_de takes one of {', '.join(ARMS)}, got {arm!r}")
    config = train.default_config("translation")
    config.data.path = "data/tatoeba_en_de"
    config.data.shapes = 3
    config.data.bleu_sentences = 0

    config.model.preset = "tiny"
    config.model.norm = "pre"
    config.model.dtype = "float32"
    config.model.dropout = 0.0  # 0.36M parameters, and 13.6 epochs

    config.num_replicas = 8
    config.algorithm = "all_reduce" if arm == "all_reduce" else "accum_adam"
    config.schedule = ARMS[arm]
    config.optimizer.accum_steps = 2  # published is n / 2 = 4, for 13 times as many steps
    if arm == "accum_adam_ring":
        config.replicas_per_node = 2
    config.batch_size = 4096
    config.steps = 10_000
    config.learning_rate = 1.2e-2
    config.lr_schedule.warmup = "10%"
    config.lr_schedule.end_factor = 0.01
    config.optimizer.b1 = 0.8
    config.optimizer.b2 = 0.98

    config.mesh.sequential_replicas = True  # takes 0.6 times as long as vmap on a CPU
    config.log.every = 50
    config.eval.every = 2500
    config.checkpoint.every_minutes = 5.0
    return config
