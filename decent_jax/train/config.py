"""The fields of a config, their defaults, and every check that needs no device.

A config is an `ml_collections.ConfigDict` with the same fields for every task (the contents of
``model`` and ``data`` are the task's). Durations are a number of steps, or a string such as
``"2 epochs"`` or ``"5%"`` (of the run).
"""

import importlib.util
import math
import re

from ml_collections import ConfigDict, FieldReference

from decent_jax import tasks, topology
from decent_jax.errors import ConfigError
from decent_jax.json_files import flat
from decent_jax.topology import plan_file
from decent_jax.topology.plan_file import Plan

LR_SCHEDULES = ("cosine", "inverse_sqrt", "step", "constant")
PARTITIONS = ("iid", "dirichlet")
DURATIONS = ("lr_schedule.warmup", "checkpoint.every", "eval.every")

# What a resumed run may change; anything else would make it another experiment.
MAY_CHANGE = ("steps", "epochs", "num_replicas", "schedule", "local_size", "max_failing_steps")
MAY_CHANGE += ("max_consensus_distance", "mesh.", "cluster.", "checkpoint.", "eval.", "log.")
MAY_CHANGE += ("profile.", "data.workers")  # and what the task's own MAY_CHANGE says


def default_config(task: str = "language_modeling") -> ConfigDict:
    """Every field with its default; locked, so a misspelt field is an error."""
    config = ConfigDict()
    config.task = task
    config.seed = 0  # of parameters, dropout and the order of the data

    # --- Who talks to whom ---
    config.num_replicas = 8
    config.algorithm = "accum_adam"  # see docs/algorithms.md
    config.schedule = "one_peer_exp"  # see docs/topologies.md; not used by all_reduce
    config.combine = ""  # "with": mix while computing; "then": mix the result; "": algorithm's
    config.mix_every = 1  # steps between two rounds
    config.comm_dtype = "float32"  # of messages: float32, bfloat16, int8
    config.gamma = 1.0  # consensus factor: (1 - gamma) own + gamma mixed; decentralized_*, accum_*
    config.gamma_power = 0.0  # gamma times so high a power of learning rate over peak
    config.local_size = 1  # replicas a node, for alternating_exp_ring and hierarchical
    config.identical_start = True  # False: every replica draws its own initial parameters
    config.max_consensus_distance = (
        0.0  # relative; past it all replicas are averaged once. 0: never
    )

    # --- The numbers of single algorithms ---
    config.quasi_global = ConfigDict({"mu": 0.9})  # how much of its momentum is kept
    config.slowmo = ConfigDict({"alpha": 1.0, "beta": 0.7})  # slow learning rate and momentum
    config.diloco = ConfigDict()
    config.diloco.outer_learning_rate = 0.7
    config.diloco.outer_momentum = 0.9  # Nesterov's
    config.diloco.fragments = 1  # averaged in turn, one every mix_every steps
    config.diloco.delay = 0  # steps a message takes, less than mix_every
    config.diloco.alpha = 0.0  # how much of its own parameters a replica keeps
    config.choco = ConfigDict()
    config.choco.compressor = "top_k"  # top_k, random_k, int8
    config.choco.fraction = 0.1  # of the numbers that are sent, for top_k and random_k
    config.choco.gamma = 0.2  # consensus step size
    config.swarm = ConfigDict({"bits": 32})  # a parameter sent; 8 and 16: quantised by position

    # --- How long, how much ---
    config.steps = 1000
    config.epochs = 0.0  # instead of steps, when above 0
    config.batch_size = 64  # examples a step, over all replicas; of translation, tokens
    config.micro_batches = 1  # a replica's batch in so many parts, gradients averaged
    config.max_failing_steps = 20  # stop when every replica has failed so many steps in a row

    # --- Optimizer, the same on every replica ---
    config.learning_rate = 1e-3  # the peak
    config.accum_steps = 4  # window of accum_adam; the other algorithms have no window
    config.lr_schedule = ConfigDict()
    config.lr_schedule.name = "cosine"  # cosine, inverse_sqrt, step, constant
    config.lr_schedule.warmup = _duration(100)  # duration
    config.lr_schedule.end_factor = 0.1  # cosine ends at this times the peak
    config.lr_schedule.drops = "30%, 60%, 90%"  # durations after which step multiplies by
    config.lr_schedule.drop_factor = 0.1  # this
    config.optimizer = ConfigDict()
    config.optimizer.name = ""  # adam, accum_adam, sgd; empty: the algorithm's
    config.optimizer.momentum = 0.9  # of sgd
    config.optimizer.b1 = 0.9
    config.optimizer.b2 = 0.999
    config.optimizer.eps = 1e-8
    config.optimizer.weight_decay = 0.0
    config.optimizer.decoupled = True  # True: AdamW; False: decay is added to the gradient (L2)
    config.optimizer.clip_norm = 0.0  # global norm of a replica's gradient; 0: no clipping

    # --- What a task fills in ---
    module = tasks.find(task)
    config.model = module.default_model()
    config.data = module.default_data()
    config.data.workers = 0  # processes that read ahead; 0: threads of this one
    config.data.partition = "iid"  # "dirichlet": each replica has records of its own, by labels
    config.data.alpha = 1.0  # of dirichlet: small, few classes a replica; see data/partition.py

    # --- Where ---
    config.mesh = ConfigDict()
    config.mesh.devices = 0  # devices that hold replicas; 0: as many as divide num_replicas
    config.mesh.fsdp = 1  # devices of one replica, over which its arrays are sharded
    config.mesh.simulate = 0  # pretend the CPU is so many devices; 0: no
    config.mesh.loop = False  # replicas of one device one after the other: less memory
    config.cluster = ConfigDict()
    config.cluster.coordinator = ""  # "host:port"; empty: detect SLURM, Open MPI, Kubernetes
    config.cluster.num_processes = 0
    config.cluster.process_id = -1
    config.cluster.plan = ""  # file of decent_jax.planner: order of devices, schedule, mix_every
    config.cluster.timeout_s = 300  # to wait for all processes at the start
    config.cluster.heartbeat_s = 30  # a process that is silent for so long is lost: all end
    config.cluster.exchange_s = 600  # an exchange that takes so long, all being alive, fails

    # --- What is kept and said ---
    config.checkpoint = ConfigDict()
    config.checkpoint.every = _duration(1000)  # duration; 0: never by steps
    config.checkpoint.every_minutes = 10.0  # 0: never by time
    config.checkpoint.keep = 2  # newest checkpoints kept; the best model is kept besides
    config.eval = ConfigDict()
    config.eval.every = _duration(500)  # duration; 0: at the end only
    config.eval.batches = 0  # of the validation set; 0: all of it
    config.eval.batch_size = 0  # examples, over all replicas; 0: as in training
    config.eval.replicas = False  # also evaluate every replica on its own
    config.eval.ema_decay = 0.0  # also evaluate a moving average of the consensus model; 0: no
    config.log = ConfigDict()
    config.log.every = 10  # steps between two rows of metrics.jsonl
    config.log.drift_factor = 3.0  # name a replica this many times as far off as the median
    config.log.tensorboard = False
    config.log.wandb = False
    config.profile = ConfigDict()  # a trace in workdir/profile
    config.profile.start = 10  # steps before it
    config.profile.count = 0  # steps in it; 0: no trace
    return config.lock()


def validate(config: ConfigDict) -> None:
    """Check all that can be checked without a device.

    Raises:
      ConfigError: naming the field, its value and what was expected.
    """
    task = getattr(config, "task", None)
    check_fields(config, default_config(task) if isinstance(task, str) else default_config())
    _check_algorithm_fields(config)
    _choice("lr_schedule.name", config.lr_schedule.name, LR_SCHEDULES)
    _choice("data.partition", config.data.partition, PARTITIONS)
    if not 0 < config.data.alpha < math.inf:
        raise ConfigError(f"data.alpha must be above 0 and finite, got {config.data.alpha}")
    positive = ("num_replicas", "mix_every", "batch_size", "micro_batches", "accum_steps")
    positive += ("max_failing_steps", "local_size", "log.every", "checkpoint.keep")
    positive += ("cluster.timeout_s", "cluster.heartbeat_s", "cluster.exchange_s", "mesh.fsdp")
    for name in positive:
        if field(config, name) < 1:
            raise ConfigError(f"{name} must be at least 1, got {field(config, name)}")
    not_negative = ("seed", "steps", "epochs", "learning_rate", "max_consensus_distance")
    not_negative += ("optimizer.eps", "optimizer.weight_decay", "optimizer.clip_norm")
    not_negative += ("checkpoint.every_minutes", "eval.batches", "eval.batch_size")
    not_negative += ("gamma", "gamma_power", "slowmo.alpha", "diloco.outer_learning_rate")
    not_negative += ("mesh.devices", "mesh.simulate", "lr_schedule.end_factor", "log.drift_factor")
    not_negative += ("lr_schedule.drop_factor", "data.prefetch", "data.workers")
    not_negative += ("profile.start", "profile.count")
    for name in not_negative:
        if not field(config, name) >= 0:
            raise ConfigError(f"{name} must not be negative, got {field(config, name)}")
    for name in (
        *("optimizer.b1", "optimizer.b2", "optimizer.momentum", "eval.ema_decay"),
        *("quasi_global.mu", "slowmo.beta", "diloco.outer_momentum"),
    ):
        if not 0 <= field(config, name) < 1:
            raise ConfigError(f"{name} must be in [0, 1), got {field(config, name)}")
    for name in DURATIONS:
        parse_duration(name, field(config, name))
    for drop in _drops(config):
        parse_duration("each of lr_schedule.drops", drop)
    if config.epochs == 0 and config.steps < 1:
        raise ConfigError(f"steps must be at least 1 (or epochs above 0), got {config.steps}")
    n = config.num_replicas
    for name in ("batch_size", "eval.batch_size"):
        if field(config, name) % n:
            raise ConfigError(
                f"{name} {field(config, name)} cannot be shared out over {n} replicas; "
                f"use a multiple of {n}"
            )
    if (config.batch_size // n) % config.micro_batches:
        raise ConfigError(
            f"a replica's {config.batch_size // n} examples (batch_size {config.batch_size} over "
            f"{n} replicas) cannot be cut into {config.micro_batches} micro_batches"
        )
    number, unit = parse_duration("lr_schedule.warmup", config.lr_schedule.warmup)
    if config.lr_schedule.name == "cosine" and unit == "step" and not config.epochs:
        check_warmup(number, config.steps)
    for name, module in (("tensorboard", "tensorboardX"), ("wandb", "wandb")):
        if config.log[name] and importlib.util.find_spec(module) is None:
            raise ConfigError(
                f"log.{name} needs {module}: pip install 'decent_jax[{name}]', or set it to False"
            )
    schedule = make_schedule(config)
    _check_algorithm(config, schedule)
    check_cluster(config)
    if config.mesh.fsdp > 1:
        _check_fsdp(config, schedule)
    tasks.find(config.task).validate(config)


def load_plan(config: ConfigDict) -> Plan | None:
    """The plan that ``cluster.plan`` names, if any; the planner makes it.

    Raises:
      ConfigError: it cannot be read, or is for another number of replicas.
    """
    path = config.cluster.plan
    if not path:
        return None
    try:
        plan = plan_file.load(path)
    except ValueError as error:
        raise ConfigError(f"cluster.plan: {error}") from None
    if len(plan.devices) != config.num_replicas:
        raise ConfigError(
            f"cluster.plan {path} is for {len(plan.devices)} replicas, but num_replicas is "
            f"{config.num_replicas}; plan for this number, or leave cluster.plan out"
        )
    return plan


def follow_plan(config: ConfigDict, plan: Plan) -> ConfigDict:
    """A copy with the plan's ``schedule`` (by its name), ``local_size`` and ``mix_every``."""
    config = ConfigDict(config.to_dict())
    config.schedule = plan.schedule.name
    config.local_size = plan.schedule.rounds[0].group_size
    config.mix_every = plan.mix_every
    return config.lock()


def make_schedule(config: ConfigDict) -> topology.Schedule:
    """The gossip schedule; that of `all_reduce`, which sends no parameters, is not used."""
    plan = load_plan(config)
    if plan is not None:
        return plan.schedule
    try:
        schedule = topology.make(config.schedule, config.num_replicas, local_size=config.local_size)
        fragments = config.diloco.fragments if config.algorithm == "diloco" else 1
        return topology.repeat(schedule, fragments) if fragments > 1 else schedule
    except ValueError as error:
        if config.algorithm == "all_reduce" and _names_a_schedule(config.schedule):
            return topology.make("complete", config.num_replicas)
        raise ConfigError(f"schedule: {error}") from None


def _names_a_schedule(text: str) -> bool:
    try:
        topology.make(text, 1)  # one replica fits every schedule
    except ValueError:
        return False
    return True


def parse_duration(name: str, value: int | str) -> tuple[float, str]:
    """(number, unit) of a duration; the unit is "step", "epoch" or "%"."""
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value, "step"
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(step|epoch|%)?s?\s*", str(value))
    unit = (match[2] or "step") if match else ""
    if match is None or (unit == "step" and "." in match[1]):
        raise ConfigError(
            f"{name} must be a number of steps, or a string such as '2 epochs' or '5%' (of the "
            f"run), got {value!r}"
        )
    return float(match[1]), unit


def in_steps(name: str, value: int | str, steps_per_epoch: int, steps: int) -> int:
    """A duration in steps, in a run of ``steps``; at least one unless it is 0."""
    number, unit = parse_duration(name, value)
    scale = {"step": 1, "epoch": steps_per_epoch, "%": steps / 100}[unit]
    return max(round(number * scale), 1) if number > 0 else 0


def drops_in_steps(config: ConfigDict, steps_per_epoch: int, steps: int) -> list[int]:
    """Steps of ``lr_schedule.drops``, ascending."""
    name = "each of lr_schedule.drops"
    return sorted(in_steps(name, drop, steps_per_epoch, steps) for drop in _drops(config))


def _drops(config: ConfigDict) -> list[str]:
    return [drop for drop in config.lr_schedule.drops.split(",") if drop.strip()]


def check_warmup(warmup: float, steps: int) -> None:
    """Raises ConfigError where a cosine would begin after the end of the run."""
    if warmup > steps:
        raise ConfigError(
            f"lr_schedule.warmup of {warmup:g} steps does not fit into a run of {steps}"
        )


def field(config: ConfigDict, name: str):
    """The value of a dotted name."""
    for part in name.split("."):
        config = config[part]
    return config


def check_fields(config: ConfigDict, wanted: ConfigDict) -> None:
    """Same names and types as ``wanted``; ints pass for floats, durations are either."""
    have, default = flat(config), flat(wanted)
    for name in default:
        if name not in have:
            raise ConfigError(f"the config has no field {name!r}; begin with default_config()")
    for name, value in have.items():
        if name not in default:
            raise ConfigError(unknown_field(name, default))
        kind = type(default[name])
        if name in DURATIONS or (isinstance(value, kind) and type(value) is not bool):
            continue
        if kind is bool and isinstance(value, bool):
            continue
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            continue
        raise ConfigError(
            f"{name} must be of type {kind.__name__} (such as {default[name]!r}), got {value!r}"
        )


def unknown_field(name: str, known) -> str:
    """The sentence for a field that does not exist."""
    import difflib

    near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    hint = f"; did you mean {near[0]!r}?" if near else "; train.py --show prints them all"
    return f"the config has no field {name!r}{hint}"


def refused_changes(old: dict, new: dict) -> list[str]:
    """Fields (flat) that differ and may not change in a resumed run, as "name: old -> new".

    A field that is newer than the old run has its default there. ``batch_size`` may follow
    ``num_replicas``, so that a replica keeps its share.
    """
    old = {**flat(default_config(new["task"])), **old}
    may_change = MAY_CHANGE + tasks.find(new["task"]).MAY_CHANGE
    if old["batch_size"] * new["num_replicas"] == new["batch_size"] * old["num_replicas"]:
        may_change += ("batch_size",)
    return [
        f"{name}: {old.get(name)!r} -> {new.get(name)!r}"
        for name in sorted(old.keys() | new.keys())
        if old.get(name) != new.get(name) and not name.startswith(may_change)
    ]


def _duration(default: int) -> FieldReference:
    return FieldReference(default, field_type=object)  # an int or a string


def _choice(name: str, value: str, choices, otherwise: str = ", ") -> None:
    if value not in choices:
        raise ConfigError(f"{name} must be one of {', '.join(choices)}{otherwise}got {value!r}")


def _check_algorithm_fields(config: ConfigDict) -> None:
    from decent_jax.gossip.wire import COMM_DTYPES
    from decent_jax.optim import METHODS  # imports jax, which planning does without

    _choice("algorithm", config.algorithm, METHODS)
    if config.combine:
        _choice("combine", config.combine, ("with", "then"), " or left empty, ")
    _choice("comm_dtype", config.comm_dtype, COMM_DTYPES)


def _check_algorithm(config: ConfigDict, schedule: topology.Schedule) -> None:
    """Method, schedule, local optimizer, order and format go together."""
    from decent_jax.train import algorithm

    method = algorithm.METHODS[config.algorithm]
    try:
        algorithm.transformation(config, schedule, 1.0)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    for name in ("gamma", "gamma_power"):
        if config[name] != (name == "gamma") and "gamma" not in method.numbers:
            raise ConfigError(f"{name} is not a number of algorithm {config.algorithm}")
    if config.max_consensus_distance and method.copies:
        raise ConfigError(
            f"max_consensus_distance averages parameters only, and {config.algorithm} keeps copies "
            "that belong to them; set it to 0"
        )


def _check_fsdp(config: ConfigDict, schedule: topology.Schedule) -> None:
    """What replicas of several devices cannot be combined with."""
    n, k = config.num_replicas, config.mesh.fsdp
    if config.mesh.devices not in (0, n * k):
        raise ConfigError(
            f"{n} replicas of mesh.fsdp {k} devices each need {n * k} devices, got mesh.devices "
            f"{config.mesh.devices}; leave mesh.devices at 0"
        )
    if (config.batch_size // n // config.micro_batches) % k:
        raise ConfigError(
            f"a replica's {config.batch_size // n} examples (batch_size {config.batch_size} over "
            f"{n} replicas) in {config.micro_batches} micro_batches cannot be shared out over "
            f"mesh.fsdp {k} devices"
        )
    if config.cluster.plan:
        raise ConfigError("cluster.plan is for replicas of one device: set mesh.fsdp to 1")
    if schedule.partial_groups and config.algorithm != "all_reduce":
        raise ConfigError(
            f"{schedule.name} averages in nodes, whose replicas must be of one device each: set "
            "mesh.fsdp to 1, or use a schedule of permutations such as one_peer_exp"
        )


def check_cluster(config: ConfigDict) -> None:
    """Raises ConfigError where the fields of ``cluster`` do not go together."""
    cluster = config.cluster
    if bool(cluster.coordinator) != (cluster.num_processes > 0) or (
        cluster.coordinator and not 0 <= cluster.process_id < cluster.num_processes
    ):
        raise ConfigError(
            "cluster needs coordinator, num_processes and process_id (0 to num_processes - 1) "
            f"together, got {cluster.coordinator!r}, {cluster.num_processes} and "
            f"{cluster.process_id}"
        )
    if cluster.num_processes and config.num_replicas % cluster.num_processes:
        raise ConfigError(
            f"{config.num_replicas} replicas cannot be spread evenly over "
            f"{cluster.num_processes} processes"
        )
