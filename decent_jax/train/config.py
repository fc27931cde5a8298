"""The fields of a config, and every check of them that needs no device.

A config is an `ml_collections.ConfigDict` with the same fields for every task, but for those of
``model`` and ``data``, which the task declares.
"""

import importlib
import importlib.util
import inspect
import re
from collections.abc import Mapping
from types import ModuleType

from ml_collections import ConfigDict

from decent_jax import fields, topology
from decent_jax.errors import ConfigError
from decent_jax.fields import Field, in_steps, parse_duration
from decent_jax.gossip.wire import COMM_DTYPES
from decent_jax.json_files import flat
from decent_jax.optim import METHODS, Method
from decent_jax.topology import plan_file
from decent_jax.topology.plan_file import Plan

TASKS = ("language_modeling", "image_classification", "translation")

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
    "log.drift_factor": Field(
        3.0,
        "name a replica that is this many times as far off as the median",
        at_least=0,
        may_change=True,
    ),
    "log.tensorboard": Field(False, "also write TensorBoard's files", may_change=True),
    "log.wandb": Field(False, "also log to Weights & Biases", may_change=True),
    "profile.start": Field(10, "steps before the trace", at_least=0, may_change=True),
    "profile.count": Field(
        0, "steps traced into workdir/profile; 0: no trace", at_least=0, may_change=True
    ),
}

# Fields of earlier versions: a run that has another value than the default cannot be resumed.
REMOVED = {
    "gamma_power": Field(0.0, "power of the learning rate in the consensus factor"),
}


def task_module(name: str) -> ModuleType:
    """The module ``decent_jax.tasks.<name>``."""
    if name not in TASKS:
        raise ConfigError(f"task must be one of {', '.join(TASKS)}, got {name!r}")
    return importlib.import_module(f"decent_jax.tasks.{name}")


def fields_of(task: str) -> Mapping[str, Field]:
    """Every field of a config for ``task``, by dotted name: `FIELDS`, methods' and the task's own.

    Raises:
      ConfigError: there is no such task.
    """
    module = task_module(task)
    own = {"model": module.default_model(), "data": module.default_data()}
    may_change = ("data.prompt", "data.bleu_sentences", "data.beam")
    table = {
        name: Field(default, "", may_change=name in may_change)
        for name, default in flat(own).items()
    }
    methods = {k: v for method in METHODS.values() for k, v in _fields_of_method(method).items()}
    return {**FIELDS, "task": Field(task, FIELDS["task"].doc), **methods, **table}


def _fields_of_method(method: Method) -> dict[str, Field]:
    """The numbers of a method: its factory's keyword-only parameters, as its docstring has them.

    The factory itself refuses values that are out of range.
    """
    section = method.config_section and f"{method.config_section}."
    described = inspect.getdoc(method.make) or ""
    table = {}
    for number, default in method.numbers.items():
        found = re.search(rf"^ +(?:\w+, )*{number}(?:, \w+)*: ([^.;:]+)", described, re.MULTILINE)
        table[section + number] = Field(default, " ".join(found[1].split()) if found else "")
    return table


def table_of(config: ConfigDict) -> Mapping[str, Field]:
    """`fields_of` the config's task; those of the default task where it names none."""
    task = getattr(config, "task", None)
    return fields_of(task if isinstance(task, str) else FIELDS["task"].default)


def default_config(task: str = "language_modeling") -> ConfigDict:
    """Every field with its default; locked, so a misspelt field is an error."""
    return fields.build(fields_of(task)).lock()


def validate(config: ConfigDict) -> None:
    """Check all that can be checked without a device.

    Raises:
      ConfigError: naming the field, its value and what was expected.
    """
    fields.check(table_of(config), flat(config))
    if config.algorithm not in METHODS:
        raise ConfigError(
            f"algorithm must be one of {', '.join(METHODS)}, got {config.algorithm!r}"
        )
    _check_lengths(config)
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
    task_module(config.task).validate(config)


def _check_lengths(config: ConfigDict) -> None:
    """Steps, batches and durations go together."""
    for drop in _drops(config):
        parse_duration("each of lr_schedule.drops", drop)
    if config.epochs == 0 and config.steps < 1:
        raise ConfigError(f"steps must be at least 1 (or epochs above 0), got {config.steps}")
    n = config.num_replicas
    for name, size in (
        ("batch_size", config.batch_size),
        ("eval.batch_size", config.eval.batch_size),
    ):
        if size % n:
            raise ConfigError(
                f"{name} {size} cannot be shared out over {n} replicas; use a multiple of {n}"
            )
    if (config.batch_size // n) % config.micro_batches:
        raise ConfigError(
            f"a replica's {config.batch_size // n} examples (batch_size {config.batch_size} over "
            f"{n} replicas) cannot be cut into {config.micro_batches} micro_batches"
        )
    number, unit = parse_duration("lr_schedule.warmup", config.lr_schedule.warmup)
    if config.lr_schedule.name == "cosine" and unit == "step" and not config.epochs:
        check_warmup(number, config.steps)


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


def durations(config: ConfigDict, steps_per_epoch: int, steps: int) -> dict[str, int]:
    """Every duration of the config by its name, in steps of a run of ``steps``."""
    values = flat(config)
    return {
        name: in_steps(name, values[name], steps_per_epoch, steps)
        for name, field in table_of(config).items()
        if field.duration
    }


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


def refused_changes(old: dict, new: dict) -> list[str]:
    """Fields (flat) that differ and may not change in a resumed run, as "name: old -> new".

    A field that is newer than the old run has its default there, one that has been removed since
    (`REMOVED`) has it here. ``batch_size`` may follow ``num_replicas``, so that a replica keeps its
    share.
    """
    table = {**fields_of(new["task"]), **REMOVED}
    defaults = {name: field.default for name, field in table.items()}
    old, new = defaults | old, defaults | new
    may_change = {name for name, field in table.items() if field.may_change}
    if old["batch_size"] * new["num_replicas"] == new["batch_size"] * old["num_replicas"]:
        may_change.add("batch_size")
    return [
        f"{name}: {old.get(name)!r} -> {new.get(name)!r}"
        for name in sorted(old.keys() | new.keys())
        if old.get(name) != new.get(name) and name not in may_change
    ]


def changeable(task: str) -> str:
    """The fields that a resumed run may change; a section as ``mesh.*`` where all of it may."""
    sections: dict[str, list[tuple[str, bool]]] = {}
    for name, field in fields_of(task).items():
        section = name.partition(".")[0]
        sections.setdefault(section, []).append((name, field.may_change))
    words = []
    for section, members in sections.items():
        names = [name for name, may_change in members if may_change]
        whole = len(members) > 1 and len(names) == len(members)
        words += [f"{section}.*"] if whole else names
    return ", ".join(words)


def _check_algorithm(config: ConfigDict, schedule: topology.Schedule) -> None:
    """Method, schedule, local optimizer, order and format go together."""
    from decent_jax.train import algorithm

    method = METHODS[config.algorithm]
    try:
        algorithm.transformation(config, schedule, 1.0)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    if config.gamma != 1 and (method.config_section or "gamma" not in method.numbers):
        raise ConfigError(f"gamma is not a number of algorithm {config.algorithm}")
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
