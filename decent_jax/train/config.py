"""Turns a config into the settings of a run, and makes every check that needs no device.

A config file returns an `ml_collections.ConfigDict`; `parse` reads it once, and all other code
takes the frozen `Config`.
"""

import dataclasses
import functools
import os
from collections.abc import Callable, Mapping
from dataclasses import make_dataclass
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any, TypeVar

from ml_collections import ConfigDict
from ml_collections.config_dict import RequiredValueError

from decent_jax import tasks, topology
from decent_jax.cluster import start as cluster
from decent_jax.ground import fields
from decent_jax.ground.errors import ConfigError, DataError
from decent_jax.ground.fields import Field, check_rules, in_steps, parse_duration, section, setting
from decent_jax.ground.format import shorten, shown
from decent_jax.ground.json_files import Json, flat, read_entries
from decent_jax.monitor import trackers
from decent_jax.optim import METHODS, MethodSpec
from decent_jax.plan import plan_file
from decent_jax.plan.plan_file import Plan
from decent_jax.train import algorithm
from decent_jax.train.settings import SYNCHRONOUS, TRAINERS, Config

AnyConfig = TypeVar("AnyConfig", bound=Config)
AUTO = "auto"  # a schedule that `decent_jax.train.experiment` chooses once the hosts are known
ONE_HOST = "one_peer_exp"  # `AUTO` if no other schedule fits, and until the hosts are known

_WORKERS = 32  # largest ``data.workers`` per core


def trainer_of(config: Config) -> Any:
    """The module of `TRAINERS` that trains this config, with ``check``, ``run``, ``dry_run``."""
    return TRAINERS[config.trainer].load()


def config_class(task: str) -> type[Config]:
    """The subclass of `Config` with the sections of a task, of all trainers and of all methods.

    Raises:
      ConfigError: there is no such task.
    """
    if not TRAINERS:
        raise ConfigError("decent_jax is not installed: run `pip install -e .` in its folder")
    own, methods = tasks.sections(tasks.find(task)), tuple(METHODS.values())
    return _composed(own["model"], own["data"], tuple(TRAINERS.values()), methods)


@functools.cache
def _composed(
    model: type, data: type, trainers: tuple[EntryPoint, ...], methods: tuple[MethodSpec, ...]
) -> type[Config]:
    sections = {"model": model, "data": data}
    for point in trainers:
        if point.name != SYNCHRONOUS:  # it has no section, and takes seconds to import
            sections |= point.load().SECTIONS
    for method in methods:  # their factories refuse numbers that are out of range
        name = method.config_section
        if name and method.numbers:
            numbers = [(n, object, setting(x, method.help[n])) for n, x in method.numbers.items()]
            sections[name] = make_dataclass(name, numbers, frozen=True)
    parts = [(name, kind, section(kind)) for name, kind in sections.items()]
    pickled = {"__reduce__": _reduced}  # other processes compose the class again
    return make_dataclass("Config", parts, bases=(Config,), frozen=True, namespace=pickled)


def _reduced(config: Config) -> tuple[Callable[[Json], Config], tuple[Json]]:
    return from_values, (config.by_name,)


def fields_of(task: str) -> Mapping[str, Field]:
    """Every field of a config for ``task``, by its dotted name."""
    table = fields.table(config_class(task))
    table["task"] = dataclasses.replace(table["task"], default=task)
    table["trainer"] = dataclasses.replace(table["trainer"], choices=tuple(TRAINERS))
    return table


def table_of(config: ConfigDict) -> Mapping[str, Field]:
    """`fields_of` for the config's task, or for the default task if it names none."""
    task = getattr(config, "task", None)
    return fields_of(task if isinstance(task, str) else Config.task)


def default_config(task: str = Config.task) -> ConfigDict:
    """A config with the default of every field; locked, so that a misspelt field is an error."""
    return fields.defaults(fields_of(task)).lock()


def parse(config: ConfigDict) -> Config:
    """Parse a config into its settings, and check their types and bounds.

    Raises:
      ConfigError: a field is unknown or its value is wrong; the message names both.
    """
    values = values_of(config)
    fields.check(table_of(config), values)
    return fields.build(config_class(config.task), values)


def values_of(config: ConfigDict) -> Json:
    """The values of a config by dotted name.

    Raises:
      ConfigError: a placeholder has no value, or a section contains itself.
    """
    try:
        return flat(config)
    except RequiredValueError:
        raise ConfigError("the config has a placeholder; give it a value in its file") from None
    except RecursionError:
        raise ConfigError("the config contains itself; its sections must be a tree") from None


def load_saved(workdir: str | Path) -> Any:
    """The `Config` that the run in ``workdir`` has saved.

    Missing fields get their defaults. Undeclared fields, such as those of a method that is not
    registered in this process, are dropped.

    Raises:
      ConfigError: there is no config, or a value has the wrong type or is out of bounds.
    """
    path = Path(workdir) / "config.json"
    try:
        values = read_entries(path)
        table = fields_of(values["task"])
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    except (OSError, DataError, AttributeError, KeyError, TypeError):
        raise ConfigError(f"{workdir} holds no run: there is no readable config.json") from None
    for name in table.keys() & values.keys():
        table[name].check(f"{path}: {name}", values[name])
    return from_values(values)


def from_values(values: Json) -> Config:
    """The `Config` with these values by dotted name, and defaults for all other fields."""
    kind = config_class(values["task"])
    defaults = {name: field.default for name, field in fields.table(kind).items()}
    return fields.build(kind, defaults | values)


def validate(config: ConfigDict) -> None:
    """Make every check that needs no device, as a run, `--check` and the planner do.

    Raises:
      ConfigError: the config cannot be used; the message names the field and its value.
    """
    check_run(parse(config))


def check_run(config: Config) -> None:
    """As `validate`, for a parsed config."""
    trainer_of(config).check(config)


def check(config: Config) -> tuple[topology.Schedule, Plan | None]:
    """Make the checks common to all kinds of runs; the ``check`` of each of `TRAINERS` calls this.

    Returns:
      The schedule, and the plan if the config names one.

    Raises:
      ConfigError: see `validate`.
    """
    trackers.named(config.log.trackers)
    _check_sizes(config)
    cluster.check(config)
    plan = load_plan(config)
    schedule = _check_method(config, plan)
    try:
        tasks.find(config.task).validate(config)
    except OSError as error:  # a path that cannot exist
        raise ConfigError(f"{shown(error.filename)}: {error.strerror}") from None
    return schedule, plan


def _check_sizes(config: Config) -> None:
    """Check the fields that depend on neither the data, nor a model, nor other processes."""
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
            (alone and config.mesh.fsdp == 1) or not config.data.on_device,
            "data.on_device",
            f"must be False with mesh.fsdp {config.mesh.fsdp} and trainer {config.trainer}",
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
        warmup, steps_per_epoch = config.lr_schedule.warmup, 0  # not known yet; checked again later
        steps = in_steps("lr_schedule.warmup", warmup, steps_per_epoch, config.steps)
        check_warmup(steps, config.steps)


def check_cuts(config: Config, name: str) -> None:
    """Refuse a number of micro-batches, in the field ``name``, that does not divide a batch."""
    each = config.batch_size // config.num_replicas
    share = f"{each}, a replica's examples (batch_size {config.batch_size} / num_replicas)"
    check_rules(config, (each % fields.value_of(config, name) == 0, name, f"must divide {share}"))


def load_plan(config: Config) -> Plan | None:
    """The planner's plan that ``cluster.plan`` names; None if the field is empty.

    Raises:
      ConfigError: the plan cannot be read, or is for another number of replicas or stages.
    """
    path = config.cluster.plan
    if not path:
        return None
    try:
        plan = plan_file.load(path)
    except ValueError as error:
        raise ConfigError(f"cluster.plan: {error}", field="cluster.plan", value=path) from None
    pipelines = config.trainer == "pipelines"
    stages = fields.value_of(config, "pipeline.stages") if pipelines else 1
    for name, planned, wanted in (
        ("num_replicas", plan.schedule.num_replicas, config.num_replicas),
        ("pipeline.stages", plan.stages, stages),
    ):
        if planned != wanted:
            why = f"must be for {name} {wanted}, but is for {planned}"
            raise ConfigError.about("cluster.plan", Path(path), why)
    return plan


def config_of_plan(config: AnyConfig, plan: Plan) -> AnyConfig:
    """The config with the plan's ``schedule`` (by name), ``replicas_per_node``, ``mix_every``."""
    name, size = plan.schedule.name, plan.schedule.rounds[0].group_size
    return changed(config, schedule=name, replicas_per_node=size, mix_every=plan.mix_every)


def changed(config: AnyConfig, **values: object) -> AnyConfig:
    """A copy of a config with new values for some fields, by dotted name."""
    return fields.build(type(config), config.by_name | values)


def make_schedule(config: Config, plan: Plan | None = None) -> topology.Schedule:
    """The communication schedule: the plan's or the config's; for `all_reduce`, "complete".

    Args:
      config: the run's config.
      plan: the plan that ``cluster.plan`` names, if the caller has already read it.
    """
    plan = plan or load_plan(config)
    try:
        schedule = _schedule(config) if plan is None else plan.schedule
        method = METHODS[config.algorithm]
        times = method.phases(algorithm.numbers_of(config, method))
        return topology.repeat(schedule, times) if times > 1 else schedule
    except ValueError as error:
        raise ConfigError(f"schedule: {error}", field="schedule", value=config.schedule) from None


def _schedule(config: Config) -> topology.Schedule:
    """The schedule that the config names, without regard to a plan."""
    n = config.num_replicas
    if config.algorithm == "all_reduce":
        return topology.make("complete", n)
    if config.schedule == AUTO:
        return topology.make(ONE_HOST, n)
    return topology.make(config.schedule, n, replicas_per_node=config.replicas_per_node)


def durations(config: Config, steps_per_epoch: int, steps: int) -> dict[str, int]:
    """Every duration of the config by field name, in steps; the run has ``steps`` in all."""
    return {
        name: in_steps(name, fields.value_of(config, name), steps_per_epoch, steps)
        for name, field in fields.table(type(config)).items()
        if field.duration
    }


def drops_in_steps(config: Config, steps_per_epoch: int, steps: int) -> list[int]:
    """The steps at which ``lr_schedule.drops`` lowers the learning rate, ascending."""
    name = "each of lr_schedule.drops"
    return sorted(in_steps(name, drop, steps_per_epoch, steps) for drop in _drops(config))


def _drops(config: Config) -> list[str]:
    return [drop for drop in config.lr_schedule.drops.split(",") if drop.strip()]


def check_warmup(warmup: int, steps: int) -> None:
    """Raise ConfigError if the warm-up is longer than the run."""
    if warmup > steps:
        raise ConfigError.about("lr_schedule.warmup", warmup, f"must be at most {steps} steps")


def refused_changes(old: Json, new: Json) -> list[str]:
    """Fields that differ but may not change in a resumed run, as "name: old -> new".

    For a field that the old run lacks, such as one of a method registered since, the default counts
    as its old value. ``batch_size`` may change in proportion to ``num_replicas``.
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
    """The names of the fields that a resumed run may change, comma-separated."""
    return ", ".join(name for name, field in fields_of(task).items() if field.may_change)


def _check_method(config: Config, plan: Plan | None) -> topology.Schedule:
    """Reject options that the method would ignore, and build it; returns its schedule."""
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
    delay = algorithm.numbers_of(config, method).get("delay", 0)
    shapes = getattr(config.data, "shapes", 0)
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
        (config.gamma == 1 or has_gamma, "gamma", f"must be 1: {name} has no gamma"),
        (exponent == 0 or has_gamma, "gamma_lr_exponent", f"must be 0: {name} has no gamma"),
        (
            exponent == 0 or config.learning_rate,
            "gamma_lr_exponent",
            "must be 0 where learning_rate is 0",
        ),
    )
    if config.mesh.fsdp > 1:
        _check_sharded(config, schedule)
    algorithm.transformation(config, schedule, 1.0)
    return schedule


def _check_sharded(config: Config, schedule: topology.Schedule) -> None:
    """Check the requirements of sharding a replica over several devices."""
    n, k = config.num_replicas, config.mesh.fsdp
    each, several = config.batch_size // n // config.micro_batches, "where mesh.fsdp is above 1"
    groups = config.algorithm != "all_reduce" and schedule.partial_groups
    check_rules(
        config,
        (config.mesh.devices in (0, n * k), "mesh.devices", f"must be 0 or {n * k} {several}"),
        (each % k == 0, "mesh.fsdp", f"must divide {each}, the examples of a micro-batch"),
        (not config.cluster.plan, "mesh.fsdp", "must be 1 with cluster.plan"),
        (not groups, "schedule", f"must be without groups, such as one_peer_exp, {several}"),
    )
