"""The fields of every run: default, meaning, bound, and whether a resumed run may change it.

A task adds its ``model`` and ``data``, a method the section with its numbers (`fields_of`).
"""

from decent_jax.fields import Field
from decent_jax.gossip.wire import COMM_DTYPES

FIELDS = {
    "task": Field("language_modeling", "what is trained: a module of decent_jax.tasks"),
    "seed": Field(0, "seed of parameters, dropout and the order of the data", at_least=0),
    # --- Who averages with whom ---
    "num_replicas": Field(8, "models with parameters of their own", at_least=1, may_change=True),
    "algorithm": Field("accum_adam", "how replicas train and communicate; see docs/algorithms.md"),
    "schedule": Field(
        "one_peer_exp",
        "who averages with whom, round by round; see docs/topologies.md; all_reduce ignores it",
        may_change=True,
    ),
    "combine": Field(
        "",
        '"with": mix while computing; "then": mix the result; "": the algorithm\'s own order',
        choices=("with", "then", ""),
    ),
    "mix_every": Field(1, "steps from one round to the next", at_least=1),
    "comm_dtype": Field("float32", "format of messages", choices=COMM_DTYPES),
    "local_size": Field(
        1,
        "replicas per node, for alternating_exp_ring and hierarchical",
        at_least=1,
        may_change=True,
    ),
    "identical_start": Field(
        True, "all replicas start with the same parameters; False: each draws its own"
    ),
    "max_consensus_distance": Field(
        0.0,
        "relative distance beyond which all replicas are averaged once; 0: never",
        at_least=0,
        may_change=True,
    ),
    # --- How long, how much ---
    "steps": Field(1000, "updates of each replica", at_least=0, may_change=True),
    "epochs": Field(
        0.0, "passes over the data, in place of steps when above 0", at_least=0, may_change=True
    ),
    "batch_size": Field(
        64, "examples per step of all replicas together; of translation, tokens", at_least=1
    ),
    "micro_batches": Field(
        1,
        "parts of a replica's batch that are computed one after the other; their gradients "
        "are averaged",
        at_least=1,
    ),
    "max_failing_steps": Field(
        20,
        "steps in a row without a finite update on any replica that end the run",
        at_least=1,
        may_change=True,
    ),
    # --- Optimizer, the same on every replica ---
    "learning_rate": Field(1e-3, "the peak", at_least=0),
    "accum_steps": Field(
        4, "window of accum_adam, in steps; the other algorithms have no window", at_least=1
    ),
    "lr_schedule.name": Field(
        "cosine",
        "shape of the learning rate",
        choices=("cosine", "inverse_sqrt", "step", "constant"),
    ),
    "lr_schedule.warmup": Field(100, "linear warm-up", duration=True),
    "lr_schedule.end_factor": Field(0.1, "cosine ends at this times the peak", at_least=0),
    "lr_schedule.drops": Field(
        "30%, 60%, 90%", "durations after which the shape step multiplies the rate by drop_factor"
    ),
    "lr_schedule.drop_factor": Field(0.1, "see drops", at_least=0),
    "optimizer.name": Field("", "adam, accum_adam or sgd; empty: the algorithm's"),
    "optimizer.momentum": Field(0.9, "of sgd", at_least=0, below=1),
    "optimizer.b1": Field(0.9, "decay rate of Adam's first moment", at_least=0, below=1),
    "optimizer.b2": Field(0.999, "decay rate of Adam's second moment", at_least=0, below=1),
    "optimizer.eps": Field(1e-8, "added to the root of Adam's second moment", at_least=0),
    "optimizer.weight_decay": Field(0.0, "per step, times the learning rate", at_least=0),
    "optimizer.decoupled": Field(
        True, "True: AdamW; False: weight decay is added to the gradient (L2)"
    ),
    "optimizer.clip_norm": Field(
        0.0, "bound on the global norm of a replica's gradient; 0: none", at_least=0
    ),
    # --- Data of every task ---
    "data.workers": Field(
        0, "processes that read ahead; 0: threads of this one", at_least=0, may_change=True
    ),
    "data.prefetch": Field(4, "batches read ahead", at_least=0, may_change=True),
    "data.partition": Field(
        "iid",
        '"dirichlet": each replica owns some of the records, drawn by label',
        choices=("iid", "dirichlet"),
    ),
    "data.alpha": Field(
        1.0, "concentration of dirichlet: small means few classes per replica", above=0
    ),
    # --- Where ---
    "mesh.devices": Field(
        0,
        "devices that hold replicas; 0: as many as divide num_replicas",
        at_least=0,
        may_change=True,
    ),
    "mesh.fsdp": Field(
        1, "devices per replica, over which its arrays are sharded", at_least=1, may_change=True
    ),
    "mesh.simulate": Field(
        0, "number of devices that the CPU pretends to be; 0: off", at_least=0, may_change=True
    ),
    "mesh.loop": Field(
        False,
        "compute a device's replicas one after the other, which takes less memory",
        may_change=True,
    ),
    "cluster.coordinator": Field(
        "", '"host:port" of process 0; empty: detect SLURM, Open MPI, Kubernetes', may_change=True
    ),
    "cluster.num_processes": Field(0, "processes of the run", may_change=True),
    "cluster.process_id": Field(-1, "number of this process, from 0", may_change=True),
    "cluster.plan": Field(
        "", "file of decent_jax.planner: order of devices, schedule, mix_every", may_change=True
    ),
    "cluster.timeout_s": Field(
        300, "seconds to wait for all processes at the start", at_least=1, may_change=True
    ),
    "cluster.heartbeat_s": Field(
        30,
        "seconds of silence after which a process counts as lost and all end",
        at_least=1,
        may_change=True,
    ),
    "cluster.exchange_s": Field(
        600,
        "seconds after which an exchange between living processes fails",
        at_least=1,
        may_change=True,
    ),
    # --- What is kept and reported ---
    "checkpoint.every": Field(1000, "0: never by steps", duration=True, may_change=True),
    "checkpoint.every_minutes": Field(10.0, "0: never by time", at_least=0, may_change=True),
    "checkpoint.keep": Field(
        2, "newest checkpoints kept, besides the one of the best model", at_least=1, may_change=True
    ),
    "eval.every": Field(500, "0: at the end only", duration=True, may_change=True),
    "eval.batches": Field(
        0, "batches of the validation set; 0: all of it", at_least=0, may_change=True
    ),
    "eval.batch_size": Field(
        0, "examples of all replicas together; 0: as in training", at_least=0, may_change=True
    ),
    "eval.replicas": Field(False, "also evaluate every replica by itself", may_change=True),
    "eval.ema_decay": Field(
        0.0,
        "also evaluate a moving average of the consensus model with this decay; 0: no",
        at_least=0,
        below=1,
        may_change=True,
    ),
    "log.every": Field(10, "steps per row of metrics.jsonl", at_least=1, may_change=True),
    "log.tensorboard": Field(False, "also write TensorBoard's files", may_change=True),
    "log.wandb": Field(False, "also log to Weights & Biases", may_change=True),
    "profile.count": Field(
        0,
        "steps traced into workdir/profile, after the first 10; 0: no trace",
        at_least=0,
        may_change=True,
    ),
}

# Fields of earlier versions: a run that has another value than the default cannot be resumed.
# Those that may change are forgotten.
REMOVED = {
    "gamma_power": Field(0.0, "power of the learning rate in the consensus factor"),
    "log.drift_factor": Field(3.0, "distance at which a replica drifts", may_change=True),
    "profile.start": Field(10, "steps before the trace", may_change=True),
}
