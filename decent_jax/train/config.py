"""The fields of a config, and every check of them that needs no device.

A config is an `ml_collections.ConfigDict` with the same fields for every task, except those of
``model`` and ``data``, which the task declares.
"""

import os
from collections.abc import Mapping
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from decent_jax import tasks, topology
from decent_jax.cluster import start as cluster
from decent_jax.gossip import codecs
from decent_jax.ground import fields
from decent_jax.ground.errors import ConfigError, DataError
from decent_jax.ground.fields import Changeable, Field, check_rules, in_steps, parse_duration
from decent_jax.ground.format import shorten, shown
from decent_jax.ground.json_files import flat, read_json
from decent_jax.optim import METHODS
from decent_jax.plan import plan_file
from decent_jax.plan.plan_file import Plan
from decent_jax.train import algorithm, trackers

AUTO = "auto"  # `decent_jax.train.experiment` chooses the schedule once the hosts are known
ONE_HOST = "one_peer_exp"  # its choice within one host, and the placeholder until then

# Each entry point of this group of the package's metadata trains configs: a room or a package with
# FIELDS, check, run and dry_run. `decent_jax.train.synchronous` is one of them, without FIELDS.
TRAINERS = {point.name: point for point in entry_points(group="decent_jax.trainers")}
SYNCHRONOUS = "synchronous"

# The fields that train/ declares. Other rooms (cluster, peers, pipelines), tasks (model and data)
# and methods (the section with their numbers) declare their own; see `fields_of`.
FIELDS = {
    "task": Field("language_modeling", "the task: a module of decent_jax.tasks"),
    "seed": Field(0, "of initialization, dropout, data order", at_least=0, at_most=2**63 - 1),
    "trainer": Field(
        SYNCHRONOUS,
        "synchronous: one program; peers: no common step; pipelines: replicas cut into stages",
        choices=tuple(TRAINERS),
    ),
    # --- Communication ---
    "num_replicas": Changeable(8, "number of models with their own parameters", at_least=1),
    "algorithm": Field("accum_adam", "training and communication; see docs/algorithms.md"),
    "schedule": Changeable(
        "one_peer_exp",
        "communication graph, see docs/topologies.md; auto: chosen for the hosts; all_reduce "
        "ignores it",
    ),
    "combine": Field(
        "",
        "awc: mix the old parameters (adapt with combine); atc: the new ones (adapt then combine)",
        choices=("awc", "atc", ""),
    ),
    "mix_every": Field(1, "steps per round", at_least=1),
    "codec": Field("float32", "message format", choices=tuple(codecs.NAMED)),
    "replicas_per_node": Changeable(
        1, "replicas per node, for schedules that use nodes", at_least=1
    ),
    "gamma_lr_exponent": Field(
        0.0, "multiplies gamma by (learning rate / peak) to this power", at_least=0
    ),
    "same_init": Field(True, "all replicas start equal; False: each draws its own parameters"),
    "max_consensus_distance": Changeable(
        0.0, "relative distance above which all replicas are averaged once; 0: never", at_least=0
    ),
    # --- Length and batch ---
    "steps": Changeable(1000, "updates of each replica", at_least=0),
    "epochs": Changeable(0.0, "passes over the data; above 0, it replaces steps", at_least=0),
    "batch_size": Field(64, "examples per step over all replicas; translation: tokens", at_least=1),
    "micro_batches": Field(1, "sequential parts of a replica's batch", at_least=1),
    "max_failing_steps": Changeable(
        20, "consecutive steps without a finite update on any replica that end the run", at_least=1
    ),
    # --- Optimizer, the same on every replica ---
    "learning_rate": Field(1e-3, "peak learning rate", at_least=0),
    "lr_schedule.name": Field(
        "cosine",
        "shape of the decay",
        choices=("cosine", "linear", "inverse_sqrt", "step", "constant"),
    ),
    "lr_schedule.warmup": Field("10%", "length of the linear warm-up", duration=True),
    "lr_schedule.end_factor": Field(
        0.1, "cosine and linear end at this multiple of the peak", at_least=0
    ),
    "lr_schedule.drops": Field("30%, 60%, 90%", "with name step: when the learning rate drops"),
    "lr_schedule.drop_factor": Field(0.1, "factor at each drop", at_least=0),
    "optimizer.name": Field(
        "",
        "adam, accum_adam, sgd or muon; empty: the algorithm's; or any optax optimizer, or your "
        "own, by its dotted name with arguments: optax.contrib.muon(beta=0.9)",
    ),
    "optimizer.accum_steps": Field(
        4, "steps whose mean gradient enters the moments of accum_adam", at_least=1
    ),
    "optimizer.momentum": Field(0.9, "momentum of sgd and muon", at_least=0, below=1),
    "optimizer.b1": Field(0.9, "decay rate of Adam's first moment", at_least=0, below=1),
    "optimizer.b2": Field(0.999, "decay rate of Adam's second moment", at_least=0, below=1),
    "optimizer.eps": Field(1e-8, "added to the root of Adam's second moment", at_least=0),
    "optimizer.weight_decay": Field(0.0, "per step, multiplied by the learning rate", at_least=0),
    "optimizer.decoupled": Field(True, "weight decay as in AdamW; False: in the gradient (L2)"),
    "optimizer.clip_norm": Field(0.0, "bound on a replica's gradient norm; 0: none", at_least=0),
    # --- Data of every task ---
    "data.workers": Changeable(0, "processes that read ahead; 0: threads", at_least=0),
    "data.prefetch": Changeable(4, "batches read ahead", at_least=0),
    "data.partition": Field(
        "iid", "dirichlet: each replica has records drawn by label", choices=("iid", "dirichlet")
    ),
    "data.alpha": Field(1.0, "of the Dirichlet; small: few classes per replica", above=0),
    # --- Where ---
    "mesh.devices": Changeable(
        0, "devices that hold replicas; 0: as many as divide num_replicas", at_least=0
    ),
    "mesh.fsdp": Changeable(1, "devices over which a replica is sharded", at_least=1),
    "mesh.sequential_replicas": Changeable(
        False, "compute a device's replicas sequentially, with less memory"
    ),
    # --- Checkpoints, evaluation, logs ---
    "checkpoint.every": Changeable(1000, "steps between checkpoints; 0: never", duration=True),
    "checkpoint.every_minutes": Changeable(10.0, "minutes between them; 0: never", at_least=0),
    "checkpoint.keep": Changeable(2, "newest checkpoints to keep, besides the best", at_least=1),
    "recovery.every": Changeable(
        -1,
        "steps between in-memory checkpoints; 0: none; -1: if supervised, at 1% of the step time",
        at_least=-1,
    ),
    "recovery.mirror": Changeable(
        False, "whether each process also mirrors the in-memory checkpoint of another"
    ),
    "eval.every": Changeable(500, "steps between evaluations; 0: only at the end", duration=True),
    "eval.batches": Changeable(0, "validation batches per evaluation; 0: all", at_least=0),
    "eval.batch_size": Changeable(0, "examples per batch; 0: as in training", at_least=0),
    "eval.replicas": Changeable(
        False, "also evaluate each replica: the worst and the mean, such as eval/loss_worst"
    ),
    "log.every": Changeable(10, "steps per row of metrics.jsonl", at_least=1),
    "log.trackers": Changeable("", "tensorboard, wandb or your own classes; comma-separated"),
    "profile.count": Changeable(0, "steps to trace into workdir/profile, after 10", at_least=0),
}

_WORKERS = 32  # per core


def trainer_of(config: ConfigDict) -> Any:
    """The trainer of this config, one of `TRAINERS`, with ``check``, ``run`` and ``dry_run``.

    Raises:
      ConfigError: there is no such trainer.
    """
    if not TRAINERS:
        raise ConfigError(
            "the package has no metadata: install it, `pip install -e .` in its folder"
        )
    name = config.get("trainer", SYNCHRONOUS)
    FIELDS["trainer"].check("trainer", name)
    return TRAINERS[name].load()


def common_fields() -> dict[str, Field]:
    """The fields of every config, whatever its task and method, by dotted name."""
    table = {**FIELDS, **cluster.FIELDS}
    for name, point in TRAINERS.items():
        if name != SYNCHRONOUS:
            table |= point.load().FIELDS
    return table


def fields_of(task: str) -> Mapping[str, Field]:
    """Every field of a config for ``task``, by dotted name: the rooms', methods' and the task's.

    Raises:
      ConfigError: there is no such task.
    """
    table, module = common_fields(), tasks.find(task)
    table["task"] = Field(task, FIELDS["task"].doc)
    for method in METHODS.values():  # whose factories refuse numbers that are out of range
        section = method.config_section and f"{method.config_section}."
        for number, default in method.numbers.items():
            table[section + number] = Field(default, method.help[number])
    return {**table, **module.FIELDS}


def table_of(config: ConfigDict) -> Mapping[str, Field]:
    """`fields_of` the config's task; those of the default task where it names none."""
    task = getattr(config, "task", None)
    return fields_of(task if isinstance(task, str) else FIELDS["task"].default)


def default_config(task: str = "language_modeling") -> ConfigDict:
    """Every field with its default; locked, so a misspelled field is an error."""
    return fields.build(fields_of(task)).lock()


def load_saved(workdir: str | Path) -> ConfigDict:
    """The config in a run directory.

    Missing fields get their defaults. Undeclared fields, such as those of a method that is not
    registered in this process, are dropped.

    Raises:
      ConfigError: there is no config, or a value has the wrong type or is out of bounds.
    """
    path = Path(workdir) / "config.json"
    try:
        values = flat(read_json(path))
        table = fields_of(values["task"])
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    except (OSError, DataError, RecursionError, AttributeError, KeyError, TypeError):
        raise ConfigError(f"{workdir} holds no run: there is no readable config.json") from None
    config = fields.build(table)
    known = {name: value for name, value in values.items() if name in table}
    for name, value in known.items():
        table[name].check(f"{path}: {name}", value)
    with config.ignore_type():
        config.update_from_flattened_dict(known)
    return config


def validate(config: ConfigDict) -> None:
    """Check everything that needs no device, as a run, `--check` and the planner do.

    Raises:
      ConfigError: naming the field, its value and what was expected.
    """
    trainer_of(config).check(config)


def check(config: ConfigDict) -> tuple[topology.Schedule, Plan | None]:
    """The checks that all kinds of runs share; each trainer's ``check`` calls this.

    Returns:
      The schedule, and the plan if the config names one.

    Raises:
      ConfigError: as `validate`.
    """
    check_fields(config)
    _check_sizes(config)
    cluster.check(config)
    plan = load_plan(config)
    schedule = _check_method(config, plan)
    try:
        tasks.find(config.task).validate(config)
    except OSError as error:  # of a path that is none
        raise ConfigError(f"{shown(error.filename)}: {error.strerror}") from None
    return schedule, plan


def check_fields(config: ConfigDict) -> None:
    """Check every field on its own."""
    fields.check(table_of(config), flat(config))
    trackers.named(config)


def _check_sizes(config: ConfigDict) -> None:
    """Check sizes that depend on no data, model or other process."""
    for drop in _drops(config):
        parse_duration("each of lr_schedule.drops", drop)
    n, most = config.num_replicas, _WORKERS * (os.cpu_count() or 1)
    multiple = f"must be a multiple of num_replicas, {n}"
    copies, alone = config.recovery.every, config.trainer == SYNCHRONOUS
    check_rules(
        config,
        (copies <= 0 or alone, "recovery.every", f"must be 0 or -1 with {config.trainer}"),
        (
            alone or not config.eval.replicas,
            "eval.replicas",
            f"must be False with {config.trainer}",
        ),
        (
            copies <= config.steps or config.epochs > 0,
            "recovery.every",
            f"must be at most steps, {config.steps}",
        ),
        (config.epochs or config.steps, "steps", "must be at least 1 (or epochs above 0)"),
        (config.batch_size % n == 0, "batch_size", multiple),
        (config.eval.batch_size % n == 0, "eval.batch_size", multiple),
        (config.data.workers <= most, "data.workers", f"must be at most {most} on this machine"),
    )
    check_cuts(config, "micro_batches")
    if config.lr_schedule.name in ("cosine", "linear") and not config.epochs:
        warmup, steps_per_epoch = config.lr_schedule.warmup, 0  # once known, it is checked again
        steps = in_steps("lr_schedule.warmup", warmup, steps_per_epoch, config.steps)
        check_warmup(steps, config.steps)


def check_cuts(config: ConfigDict, name: str) -> None:
    """Refuse a number of micro-batches, of the field ``name``, that does not divide a batch."""
    each = config.batch_size // config.num_replicas
    share = f"{each}, a replica's examples (batch_size {config.batch_size} / num_replicas)"
    check_rules(config, (each % flat(config)[name] == 0, name, f"must divide {share}"))


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
        raise ConfigError(f"cluster.plan: {error}", field="cluster.plan", value=path) from None
    stages = config.pipeline.stages if config.trainer == "pipelines" else 1
    for name, planned, wanted in (
        ("num_replicas", plan.schedule.num_replicas, config.num_replicas),
        ("pipeline.stages", plan.stages, stages),
    ):
        if planned != wanted:
            why = f"must be for {name} {wanted}, and this one is for {planned}"
            raise ConfigError.about("cluster.plan", Path(path), why)
    return plan


def config_of_plan(config: ConfigDict, plan: Plan) -> ConfigDict:
    """The config with the plan's ``schedule`` (by name), ``replicas_per_node``, ``mix_every``."""
    name, size = plan.schedule.name, plan.schedule.rounds[0].group_size
    return changed(config, schedule=name, replicas_per_node=size, mix_every=plan.mix_every)


def changed(config: ConfigDict, **values: Any) -> ConfigDict:
    """A locked copy of a config with other values of some fields."""
    config = ConfigDict(config.to_dict())
    config.update(values)
    return config.lock()


def make_schedule(config: ConfigDict, plan: Plan | None = None) -> topology.Schedule:
    """The gossip schedule; of `all_reduce`, which sends no parameters, that of its sums.

    Args:
      config: of the run.
      plan: the one that ``cluster.plan`` names, where the caller has read it.
    """
    plan = plan or load_plan(config)
    try:
        schedule = _schedule(config) if plan is None else plan.schedule
        method = METHODS[config.algorithm]
        times = method.phases(algorithm.numbers_of(config, method))
        return topology.repeat(schedule, times) if times > 1 else schedule
    except ValueError as error:
        raise ConfigError(f"schedule: {error}", field="schedule", value=config.schedule) from None


def _schedule(config: ConfigDict) -> topology.Schedule:
    """The schedule that ``schedule`` names."""
    n = config.num_replicas
    if config.algorithm == "all_reduce":
        return topology.make("complete", n)
    if config.schedule == AUTO:
        return topology.make(ONE_HOST, n)
    return topology.make(config.schedule, n, replicas_per_node=config.replicas_per_node)


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


def check_warmup(warmup: int, steps: int) -> None:
    """Raises ConfigError if a cosine would start after the end of the run."""
    if warmup > steps:
        raise ConfigError.about("lr_schedule.warmup", warmup, f"must be at most {steps} steps")


def refused_changes(old: dict, new: dict) -> list[str]:
    """Fields (flat) that differ and may not change in a resumed run, as "name: old -> new".

    A field that the old run lacks, such as a number of a method registered since, counts with its
    default there. ``batch_size`` may follow ``num_replicas``, so that a replica keeps its share.
    """
    table = fields_of(new["task"])
    old = {name: field.default for name, field in table.items()} | old
    may_change = {name for name, field in table.items() if field.may_change}
    (b_old, n_old), (b_new, n_new) = (
        (config["batch_size"], config["num_replicas"]) for config in (old, new)
    )
    if type(b_old) is type(n_old) is int and b_old * n_new == b_new * n_old:
        may_change.add("batch_size")

    def short(value: object) -> str:
        return shorten(shown(value), 20)

    return [
        f"{shorten(name, 40)}: {short(old.get(name))} -> {short(new.get(name))}"
        for name in sorted(old.keys() | new.keys())
        if old.get(name) != new.get(name) and name not in may_change
    ]


def changeable(task: str) -> str:
    """The fields that a resumed run may change."""
    return ", ".join(name for name, field in fields_of(task).items() if field.may_change)


def _check_method(config: ConfigDict, plan: Plan | None) -> topology.Schedule:
    """Reject options that the method ignores; building it checks the rest. Returns its schedule."""
    name = config.algorithm
    check_rules(config, (name in METHODS, "algorithm", f"must be one of {', '.join(METHODS)}"))
    method, schedule = METHODS[name], make_schedule(config, plan)
    gossips, why = name != "all_reduce", "since all_reduce averages gradients in every step"
    sums = f"of algorithm {name} must have weights that sum to 1, such as one_peer_exp's"
    stem = config.schedule.partition("(")[0].strip()
    any_sums = stem not in topology.COLUMN_STOCHASTIC or name in ("push_sum", "all_reduce")
    has_gamma = not method.config_section and "gamma" in method.numbers
    waits, every = f"{method.config_section}.delay", config.mix_every
    exponent = config.gamma_lr_exponent
    delay, shapes = (flat(config).get(name, 0) for name in (waits, "data.shapes"))
    check_rules(
        config,
        (gossips or not config.combine, "combine", f"must be empty, {why}"),
        (gossips or config.mix_every == 1, "mix_every", f"must be 1, {why}"),
        (any_sums, "schedule", f"{sums} (push_sum takes others)"),
        (0 <= delay < max(every, 1), waits, f"must be at least 0, and below mix_every, {every}"),
        (delay < 2 or shapes < 2, "data.shapes", f"must be 1 where {waits} is above 1"),
        (
            config.epochs or every <= config.steps,
            "mix_every",
            f"must be at most steps, {config.steps}",
        ),
        (config.gamma <= 1, "gamma", "must be in [0, 1]"),
        (
            config.mix_rounds == 1 or "mix_rounds" in method.numbers,
            "mix_rounds",
            f"must be 1: {name} has one round per mixing step",
        ),
        (config.gamma == 1 or has_gamma, "gamma", f"must be 1: {name} has no such number"),
        (exponent == 0 or has_gamma, "gamma_lr_exponent", f"must be 0: {name} has no gamma"),
        (
            exponent == 0 or config.learning_rate,
            "gamma_lr_exponent",
            "must be 0 where learning_rate is 0",
        ),
        (
            not (config.max_consensus_distance and method.copies),
            "max_consensus_distance",
            f"must be 0: it averages parameters only, and {name} keeps copies that belong to them",
        ),
    )
    n, k = config.num_replicas, config.mesh.fsdp
    if k > 1:
        each, several = config.batch_size // n // config.micro_batches, "where mesh.fsdp is above 1"
        groups = gossips and schedule.partial_groups
        check_rules(
            config,
            (config.mesh.devices in (0, n * k), "mesh.devices", f"must be 0 or {n * k} {several}"),
            (each % k == 0, "mesh.fsdp", f"must divide {each}, the examples of a micro-batch"),
            (not config.cluster.plan, "mesh.fsdp", "must be 1 with cluster.plan"),
            (not groups, "schedule", f"must have no groups, as one_peer_exp, {several}"),
        )
    algorithm.transformation(config, schedule, 1.0)
    return schedule
