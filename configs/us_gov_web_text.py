"""A GPT of 6 million parameters on prose of American government sites, by gossip and all-reduce.

Source: a corpus of 2,250 pages of digital.gov and 18f.gsa.gov, 2.1 million GPT-2 tokens, in the
files train.jsonl.gz and valid.jsonl.gz. First, a vocabulary of 4096 tokens is learned from it:
    import gzip, json, tokenizers
    learner = tokenizers.ByteLevelBPETokenizer()
    texts = (json.loads(line)["text"] for line in gzip.open("TEXT/train.jsonl.gz", "rt"))
    learner.train_from_iterator(texts, 4096, special_tokens=["<|endoftext|>"])
    learner.save("tokenizer.json")
Then it is prepared:
    decent-jax prepare text --input TEXT/train.jsonl.gz --val_input TEXT/valid.jsonl.gz \\
        --tokenizer tokenizer.json --out data/us_gov_web_text

Command: python train.py --config configs/us_gov_web_text.py:accum_adam --workdir runs/web
After the colon comes one of the names in ARMS; `benchmarks/evidence/trainings.py` runs them.

Hardware: 2 cores. Result: see docs/results.md.
"""

from decent_jax import train

# Rate and b2 (of the embeddings) were best for `muon` with a small model; see
# docs/log/2026-11-26-web-prose.md.
MUON = {"optimizer.name": "muon", "learning_rate": 0.032, "optimizer.b2": 0.999}
ARMS = {
    "accum_adam": {"algorithm": "accum_adam", "schedule": "one_peer_exp"},
    "gossiped_momentum": {
        "algorithm": "gossiped_momentum",
        "schedule": "one_peer_exp",
        "optimizer.name": "adam",
        "learning_rate": 4e-3,
        "optimizer.b2": 0.999,
    },
    "all_reduce": {"algorithm": "all_reduce"},
    "muon": MUON | {"algorithm": "decentralized_sgd", "schedule": "one_peer_exp"},
    "gossiped_muon": MUON | {"algorithm": "gossiped_momentum", "schedule": "one_peer_exp"},
    "sparseloco_muon": MUON | {"algorithm": "sparseloco", "schedule": "complete", "mix_every": 2},
}


def get_config(arguments: str = "accum_adam"):
    (arm,) = train.chosen(arguments, tuple(ARMS))
    config = train.default_config("language_modeling")
    config.data.path = "data/us_gov_web_text"
    config.model.layers = 6
    config.model.heads = 8
    config.model.width = 256
    config.model.context = 128
    config.model.bias = False
    config.model.dtype = "float32"
    config.model.init_std = 0.06

    config.num_replicas = 8
    config.batch_size = 16
    config.steps = 2000  # 4.1 million tokens
    config.learning_rate = 2e-3
    config.lr_schedule.warmup = "10%"
    config.optimizer.accum_steps = 2
    config.optimizer.b2 = 0.95
    config.optimizer.weight_decay = 0.1
    config.optimizer.clip_norm = 1.0
    config.update_from_flattened_dict(ARMS[arm])

    config.mesh.sequential_replicas = True  # faster than vmap on a CPU
    config.log.every = 50
    config.eval.every = "10%"
    config.checkpoint.every = 0
    config.checkpoint.every_minutes = 5.0
    return config
