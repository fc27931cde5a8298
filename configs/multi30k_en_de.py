"""A small Transformer on Multi30k: captions of photographs, from English to German.

Source: the task of Consensus Control (Kong et al., 2021, arXiv:2102.04828); the text of task 1 of
Multi30k (Elliott et al., 2016): 29,000 training pairs, 1,014 validation pairs, and the test set
test_2016_flickr, prepared with a joint vocabulary of 4000 subwords:
    decent-jax prepare translation --input MULTI30K/train --val MULTI30K/val \\
        --test MULTI30K/test_2016_flickr --source_lang en --target_lang de \\
        --vocab_size 4000 --out data/multi30k

Command: python train.py --config configs/multi30k_en_de.py:accum_adam --workdir runs/multi30k
After the colon comes one of the names in ARMS; `benchmarks/evidence/trainings.py` runs them.

Hardware: 2 cores. Result: see docs/results.md.
"""

from decent_jax import train

# A replica sees 512 tokens per step, and few of the 4000 subwords, so b2 must be close to 1.
LONG = {"learning_rate": 1e-2, "optimizer.b2": 0.999}
ACCUM_ADAM = LONG | {"algorithm": "accum_adam", "schedule": "one_peer_exp"}
SWARM = LONG | {"algorithm": "swarm", "optimizer.name": "accum_adam", "mix_every": 2}
ARMS = {
    "accum_adam": ACCUM_ADAM,
    "alternating_exp_ring": ACCUM_ADAM
    | {"schedule": "alternating_exp_ring", "replicas_per_node": 2},
    "gossiped_momentum": LONG
    | {"algorithm": "gossiped_momentum", "schedule": "one_peer_exp", "optimizer.name": "adam"}
    | {"optimizer.b1": 0.9},  # a longer mean is averaged better before it is used
    "all_reduce": {"algorithm": "all_reduce"},
    "swarm": SWARM | {"schedule": "random_matching(rounds=16)"},
    "peers": SWARM | {"schedule": "random_matching", "trainer": "peers"},
}


def get_config(arguments: str = "accum_adam"):
    (arm,) = train.chosen(arguments, tuple(ARMS))
    config = train.default_config("translation")
    config.data.path = "data/multi30k"
    config.data.shapes = 3
    config.data.bleu_sentences = 1014  # the whole validation set, to see when BLEU reaches 30

    config.model.preset = "tiny"
    config.model.layers = 3
    config.model.width = 128
    config.model.ff = 256
    config.model.norm = "pre"
    config.model.dtype = "float32"
    config.model.dropout = 0.3

    config.num_replicas = 8
    config.batch_size = 4096
    config.steps = 4000  # 30 epochs
    config.learning_rate = 5e-3
    config.lr_schedule.warmup = "10%"
    config.lr_schedule.end_factor = 0.0
    config.optimizer.accum_steps = 2
    config.optimizer.b1 = 0.8  # as in tatoeba_en_de.py: short runs need short averages
    config.optimizer.b2 = 0.98
    config.update_from_flattened_dict(ARMS[arm])

    config.mesh.sequential_replicas = True  # takes 0.7 times as long as vmap on a CPU
    config.log.every = 50
    config.eval.every = 400
    config.checkpoint.every = 0
    config.checkpoint.every_minutes = 5.0
    return config
