"""The fields of every run: default, meaning, bound, and whether a resumed run may change it.

A task adds its ``model`` and ``data``, a method the section with its numbers (`fields_of`).
"""

import functools

from decent_jax.gossip.wire import COMM_DTYPES
from decent_jax.ground.fields import Field

Changeable = functools.partial(Field, may_change=True)  # in a resumed run

FIELDS = {
    "task": Field("language_modeling", "what is trained: a module of decent_jax.tasks"),
    "seed": Field(
        0, "seed of parameters, dropout and the order of the data", at_least=0, at_most=2**63 - 1
    ),
    # --- Who averages with whom ---
    "num_replicas": Changeable(8, "models, each with its own parameters", at_least=1),
    "algorithm": Field("accum_adam", "how replicas train and communicate; see docs/algorithms.md"),
    "schedule": Changeable(
        "one_peer_exp",
        "who averages with whom, round by round; see docs/topologies.md; auto: what suits the "
        "hosts; or a file of your own matrices, graph.npy; all_reduce ignores it",
    ),
    "combine": Field(
        "",
        '"with": mix while computing; "then": mix the result; "": the algorithm\'s own order',
        choices=("with", "then", ""),
    ),
    "mix_every": Field(1, "steps from one round to the next", at_least=1),
    "comm_dtype": Field("float32", "format of messages", choices=COMM_DTYPES),
    "local_size": Changeable(
        1, "replicas per node, for alternating_exp_ring and hierarchical", at_least=1
    ),
    "identical_start": Field(
        True, "all replicas start with the same parameters; False: each draws its own"
    ),
    "max_consensus_distance": Changeable(
        0.0, "relative distance beyond which all replicas are averaged once; 0: never", at_least=0
    ),
    # --- How long, how much ---
    "steps": Changeable(1000, "updates of each replica", at_least=0),
    "epochs": Changeable(0.0, "passes over the data, in place of steps when above 0", at_least=0),
    "batch_size": Field(
        64, "examples per step of all replicas together; in translation, tokens", at_least=1
    ),
    "micro_batches": Field(
        1,
        "parts of a replica's batch that are computed one after the other; their gradients "
        "are averaged",
        at_least=1,
    ),
    "max_failing_steps": Changeable(
        20, "steps in a row without a finite update on any replica that end the run", at_least=1
    ),
    # --- Optimizer, the same on every replica ---
    "learning_rate": Field(1e-3, "peak of the learning rate", at_least=0),
    "lr_schedule.name": Field(
        "cosine",
        "shape of the learning rate",
        choices=("cosine", "inverse_sqrt", "step", "constant"),
    ),
    "lr_schedule.warmup": Field("10%", "length of the linear warm-up", duration=True),
    "lr_schedule.end_factor": Field(0.1, "cosine ends at this multiple of the peak", at_least=0),
    "lr_schedule.drops": Field(
        "30%, 60%, 90%", "durations after which the shape step multiplies the rate by drop_factor"
    ),
    "lr_schedule.drop_factor": Field(0.1, "factor of each of the drops", at_least=0),
    "optimizer.name": Field(
        "",
        "adam, accum_adam, sgd or muon; empty: the algorithm's; or any of optax or your own by its "
        "dotted name, with arguments: optax.contrib.muon(beta=0.9)",
    ),
    "optimizer.window": Field(
        4,
        "steps whose gradients accum_adam averages before they enter its moments; gradient "
        "accumulation is micro_batches",
        at_least=1,
    ),
    "optimizer.momentum": Field(0.9, "momentum of sgd and muon", at_least=0, below=1),
    "optimizer.b1": Field(0.9, "decay rate of Adam's first moment", at_least=0, below=1),
    "optimizer.b2": Field(0.999, "decay rate of Adam's second moment", at_least=0, below=1),
    "optimizer.eps": Field(1e-8, "added to the root of Adam's second moment", at_least=0),
    "optimizer.weight_decay": Field(0.0, "decay per step, times the learning rate", at_least=0),
    "optimizer.decoupled": Field(
        True, "True: AdamW; False: weight decay is added to the gradient (L2)"
    ),
    "optimizer.clip_norm": Field(
        0.0, "bound on the global norm of a replica's gradient; 0: none", at_least=0
    ),
    # --- Data of every task ---
    "data.workers": Changeable(0, "processes that read ahead; 0: threads of this one", at_least=0),
    "data.prefetch": Changeable(4, "batches read ahead", at_least=0),
    "data.partition": Field(
        "iid",
        '"dirichlet": each replica owns some of the records, drawn by label',
        choices=("iid", "dirichlet"),
    ),
    "data.alpha": Field(
        1.0, "concentration of dirichlet: small means few classes per replica", above=0
    ),
    # --- Where ---
    "mesh.devices": Changeable(
        0, "devices that hold replicas; 0: as many as divide num_replicas", at_least=0
    ),
    "mesh.fsdp": Changeable(
        1, "devices per replica, over which its arrays are sharded", at_least=1
    ),
    "mesh.simulate": Changeable(
        0, "number of devices that the CPU pretends to be; 0: off", at_least=0
    ),
    "mesh.loop": Changeable(
        False, "compute a device's replicas one after the other, which takes less memory"
    ),
    "cluster.coordinator": Changeable(
        "", '"host:port" of process 0; empty: detect SLURM, Open MPI, Kubernetes, TPUs'
    ),
    "cluster.num_processes": Changeable(0, "processes of the run", at_least=0),
    "cluster.process_id": Changeable(-1, "number of this process, from 0", at_least=-1),
    "cluster.plan": Changeable(
        "", "plan of the planner, a file: order of devices, schedule, mix_every"
    ),
    "cluster.timeout_s": Changeable(
        300, "seconds to wait for all processes at the start", at_least=1
    ),
    "cluster.heartbeat_s": Changeable(
        30, "seconds of silence after which a process counts as lost and all end", at_least=1
    ),
    "cluster.exchange_s": Changeable(
        600, "seconds after which an exchange between living processes fails", at_least=1
    ),
    # --- Peers without a common step, see docs/peers.md ---
    "peers.use": Field(
        False, "True: peers that meet in random pairs (Ray) instead of one synchronous program"
    ),
    "peers.address": Changeable("", '"auto" or "host:port" of a Ray cluster; empty: this machine'),
    "peers.count": Changeable(
        0,
        "peers that train; 0: num_replicas, which fixes a peer's batch",
        at_least=0,
        at_most=2**16,
    ),
    "peers.geometric": Field(
        False, "steps between two questions: True: geometric with mean mix_every; False: mix_every"
    ),
    "peers.neighbours": Changeable(
        "all",
        'who meets whom: all; "regular(d)", a random overlay of degree d; or weighted, near peers '
        "more often",
    ),
    "peers.wire": Field(
        "float32",
        "format of copies",
        choices=("float32", "bfloat16", "int8", "lattice8", "lattice16"),
    ),
    "peers.max_lag": Changeable(
        100,
        "steps of common progress after which a peer that returns joins as a new one",
        at_least=1,
    ),
    "peers.restarts": Changeable(
        3, "how often a peer that died is replaced by a new one", at_least=0
    ),
    "peers.cpus": Changeable(0.0, "cores that Ray reserves for a peer; 0: none", at_least=0),
    "peers.gpus": Changeable(0.0, "GPUs that Ray gives to a peer", at_least=0),
    "peers.beat_s": Changeable(0.2, "seconds between two reports of a peer", above=0),
    "peers.meet_s": Changeable(10.0, "seconds a meeting may take before it is given up", above=0),
    "peers.silent_s": Changeable(
        5.0, "seconds without a report after which nobody meets a peer", above=0
    ),
    "peers.join_s": Changeable(
        60.0, "seconds that copying a state to a new peer may take", above=0
    ),
    "peers.start_s": Changeable(300.0, "seconds within which the first peer must train", above=0),
    "peers.stop_s": Changeable(
        60.0, "seconds for peers to save and end; then they are killed", above=0
    ),
    # --- Replicas of several machines, see docs/pipelines.md ---
    "pipeline.stages": Changeable(
        0, "stages that each replica is cut into, a Ray actor each; 0: none", at_least=0
    ),
    "pipeline.micro_batches": Field(
        1, "parts of a replica's batch that are on their way through the stages", at_least=1
    ),
    "pipeline.layers": Changeable(
        "", 'layers of each stage, such as "4,4,3"; empty: all take equally long'
    ),
    "pipeline.order": Changeable(
        "1f1b", "order of micro-batches; gpipe: all forward first", choices=("1f1b", "gpipe")
    ),
    "pipeline.wire": Field(
        "bfloat16", "format of activations and their gradients", choices=COMM_DTYPES
    ),
    "pipeline.address": Changeable(
        "", '"auto" or "host:port" of a Ray cluster; empty: this machine'
    ),
    "pipeline.cpus": Changeable(0.0, "cores that Ray reserves for a stage; 0: none", at_least=0),
    "pipeline.gpus": Changeable(0.0, "GPUs that Ray gives to a stage", at_least=0),
    # --- What is kept and reported ---
    "checkpoint.every": Changeable(
        1000, "steps between checkpoints; 0: never by steps", duration=True
    ),
    "checkpoint.every_minutes": Changeable(
        10.0, "minutes between checkpoints; 0: never by time", at_least=0
    ),
    "checkpoint.keep": Changeable(
        2, "newest checkpoints kept, besides the one of the best model", at_least=1
    ),
    "eval.every": Changeable(500, "steps between evaluations; 0: at the end only", duration=True),
    "eval.batches": Changeable(0, "batches of the validation set to evaluate; 0: all", at_least=0),
    "eval.batch_size": Changeable(
        0, "examples per evaluation batch of all replicas together; 0: as in training", at_least=0
    ),
    "eval.replicas": Changeable(False, "also evaluate every replica by itself"),
    "eval.ema_decay": Changeable(
        0.0,
        "also evaluate a moving average of the consensus model with this decay; 0: no",
        at_least=0,
        below=1,
    ),
    "log.every": Changeable(10, "steps per row of metrics.jsonl", at_least=1),
    "log.tensorboard": Changeable(False, "also write TensorBoard's files"),
    "log.wandb": Changeable(False, "also log to Weights & Biases"),
    "profile.count": Changeable(
        0, "steps traced into workdir/profile, after the first 10; 0: no trace", at_least=0
    ),
}

# Fields of earlier versions: a run that has another value than the default cannot be resumed.
# Those that may change are forgotten.
REMOVED = {
    "gamma_power": Field(0.0, "power of the learning rate in the consensus factor"),
    "log.drift_factor": Changeable(3.0, "distance at which a replica drifts"),
    "profile.start": Changeable(10, "steps before the trace"),
}

# Fields that have another name now, and what their users should know. Old run folders resume.
RENAMED = {
    "accum_steps": (
        "optimizer.window",
        "the window of accum_adam; to accumulate gradients set micro_batches",
    ),
}
