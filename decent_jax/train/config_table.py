"""The fields that train/ declares: their defaults, meanings and bounds.

Other rooms declare theirs (``cluster``, ``peers``, ``pipeline``), so do a task (``model`` and
``data``) and a method (the section with its numbers); see `decent_jax.train.config.fields_of`.
"""

from decent_jax.gossip import codecs
from decent_jax.ground.fields import Changeable, Field

FIELDS = {
    "task": Field("language_modeling", "what is trained: a module of decent_jax.tasks"),
    "seed": Field(0, "of parameters, dropout and the order of data", at_least=0, at_most=2**63 - 1),
    # --- Who averages with whom ---
    "num_replicas": Changeable(8, "models, each with its own parameters", at_least=1),
    "algorithm": Field("accum_adam", "how replicas train and communicate; see docs/algorithms.md"),
    "schedule": Changeable(
        "one_peer_exp",
        "who averages with whom, see docs/topologies.md; auto: what suits the hosts; or a file of "
        "your own matrices, graph.npy; all_reduce ignores it",
    ),
    "combine": Field(
        "", "with: mix while computing; then: mix the result", choices=("with", "then", "")
    ),
    "mix_every": Field(1, "steps from one round to the next", at_least=1),
    "comm_dtype": Field("float32", "format of messages", choices=tuple(codecs.NAMED)),
    "local_size": Changeable(1, "replicas per node, for schedules that know nodes", at_least=1),
    "identical_start": Field(True, "all replicas start alike; False: each draws its own"),
    # --- How long, how much ---
    "steps": Changeable(1000, "updates of each replica", at_least=0),
    "epochs": Changeable(0.0, "passes over the data, in place of steps when above 0", at_least=0),
    "batch_size": Field(64, "examples per step of all replicas; translation: tokens", at_least=1),
    "micro_batches": Field(1, "parts of a replica's batch, one after the other", at_least=1),
    "max_failing_steps": Changeable(
        20, "steps in a row without a finite update on any replica that end the run", at_least=1
    ),
    # --- Optimizer, the same on every replica ---
    "learning_rate": Field(1e-3, "peak of the learning rate", at_least=0),
    "lr_schedule.name": Field(
        "cosine", "its shape", choices=("cosine", "inverse_sqrt", "step", "constant")
    ),
    "lr_schedule.warmup": Field("10%", "length of the linear warm-up", duration=True),
    "lr_schedule.end_factor": Field(0.1, "cosine ends at this multiple of the peak", at_least=0),
    "lr_schedule.drops": Field("30%, 60%, 90%", "where step multiplies the rate by drop_factor"),
    "lr_schedule.drop_factor": Field(0.1, "factor of each of the drops", at_least=0),
    "optimizer.name": Field(
        "",
        "adam, accum_adam, sgd or muon; empty: the algorithm's; or any of optax or your own by its "
        "dotted name, with arguments: optax.contrib.muon(beta=0.9)",
    ),
    "optimizer.window": Field(
        4, "steps whose mean gradient enters the moments of accum_adam", at_least=1
    ),
    "optimizer.momentum": Field(0.9, "momentum of sgd and muon", at_least=0, below=1),
    "optimizer.b1": Field(0.9, "decay rate of Adam's first moment", at_least=0, below=1),
    "optimizer.b2": Field(0.999, "decay rate of Adam's second moment", at_least=0, below=1),
    "optimizer.eps": Field(1e-8, "added to the root of Adam's second moment", at_least=0),
    "optimizer.weight_decay": Field(0.0, "decay per step, times the learning rate", at_least=0),
    "optimizer.decoupled": Field(True, "weight decay as in AdamW; False: in the gradient (L2)"),
    "optimizer.clip_norm": Field(0.0, "bound on a replica's gradient norm; 0: none", at_least=0),
    # --- Data of every task ---
    "data.workers": Changeable(0, "processes that read ahead; 0: threads of this one", at_least=0),
    "data.prefetch": Changeable(4, "batches read ahead", at_least=0),
    "data.partition": Field(
        "iid", "dirichlet: each replica owns records, drawn by label", choices=("iid", "dirichlet")
    ),
    "data.alpha": Field(1.0, "of dirichlet; small: few classes per replica", above=0),
    # --- Where ---
    "mesh.devices": Changeable(
        0, "devices that hold replicas; 0: as many as divide num_replicas", at_least=0
    ),
    "mesh.fsdp": Changeable(1, "devices per replica, which share its arrays", at_least=1),
    "mesh.loop": Changeable(False, "compute a device's replicas in turn, with less memory"),
    # --- What is kept and reported ---
    "checkpoint.every": Changeable(1000, "steps between checkpoints; 0: never", duration=True),
    "checkpoint.every_minutes": Changeable(10.0, "likewise, minutes; 0: never", at_least=0),
    "checkpoint.keep": Changeable(2, "newest ones kept, besides the best model's", at_least=1),
    "eval.every": Changeable(500, "steps between evaluations; 0: at the end only", duration=True),
    "eval.batches": Changeable(0, "batches of the validation set to evaluate; 0: all", at_least=0),
    "eval.batch_size": Changeable(0, "examples in one of them; 0: as in training", at_least=0),
    "log.every": Changeable(10, "steps per row of metrics.jsonl", at_least=1),
    "log.tensorboard": Changeable(False, "also write TensorBoard's files"),
    "log.wandb": Changeable(False, "also log to Weights & Biases"),
    "profile.count": Changeable(0, "steps traced into workdir/profile, after 10", at_least=0),
}
