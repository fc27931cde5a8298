"""The fields of a config, and every check of them that needs no device.

A config is an `ml_collections.ConfigDict` with the same fields for every task, except those of
``model`` and ``data``, which the task declares.
"""

import importlib.util
import inspect
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from decent_jax import tasks, topology
from decent_jax.ground import fields
from decent_jax.ground.errors import ConfigError, DataError
from decent_jax.ground.fields import Field, in_steps, parse_duration
from decent_jax.ground.format import shorten, shown
from decent_jax.ground.json_files import flat, read_json
from decent_jax.optim import METHODS, Method
from decent_jax.plan import plan_file
from decent_jax.plan.plan_file import Plan
from decent_jax.train import limits
from decent_jax.train.config_table import FIELDS, REMOVED, RENAMED

AUTO = "auto"  # a schedule that `decent_jax.train.hosts` chooses once the hosts are known
ONE_HOST = "one_peer_exp"  # what it chooses within one host, and what stands for it before


def fields_of(task: str) -> Mapping[str, Field]:
    """Every field of a config for ``task``, by dotted name: `FIELDS`, methods' and the task's own.

    Raises:
      ConfigError: there is no such task.
    """
    module = tasks.find(task)
    methods = {k: v for method in METHODS.values() for k, v in _fields_of_method(method).items()}
    return {**FIELDS, "task": Field(task, FIELDS["task"].doc), **methods, **module.FIELDS}


def _fields_of_method(method: Method) -> dict[str, Field]:
    """The numbers of a method: its factory's keyword-only parameters, as its docstring has them.

    The factory itself refuses values that are out of range.
    """
    section = method.config_section and f"{method.config_section}."
    described = inspect.getdoc(method.make) or ""
    table = {}
    for number, default in method.numbers.items():
        found = re.search(rf"^ +(?:\w+, )*{number}(?:, \w+)*: ([^.;:]+)", described, re.MULTILINE)
        table[section + number] = Field(
            default, " ".join(found[1].replace("``", "").split()) if found else ""
        )
    return table


def table_of(config: ConfigDict) -> Mapping[str, Field]:
    """`fields_of` the config's task; those of the default task where it names none."""
    task = getattr(config, "task", None)
    return fields_of(task if isinstance(task, str) else FIELDS["task"].default)


def default_config(task: str = "language_modeling") -> ConfigDict:
    """Every field with its default; locked, so a misspelt field is an error."""
    return fields.build(fields_of(task)).lock()


def load_saved(workdir: str | Path) -> ConfigDict:
    """The config in a run folder; fields that are newer than the run have their defaults.

    Raises:
      ConfigError: there is none, or a value is not of its field's type or out of bounds.
    """
    path = Path(workdir) / "config.json"
    try:
        values = under_new_names(flat(read_json(path)))
        table = fields_of(values["task"])
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    except (OSError, DataError, RecursionError, AttributeError, KeyError, TypeError):
        raise ConfigError(f"{workdir} holds no run: there is no readable config.json") from None
    config = fields.build(table)
    known = {name: value for name, value in values.items() if name in table}  # others were removed
    for name, value in known.items():
        table[name].check(f"{path}: {name}", value)
    with config.ignore_type():
        config.update_from_flattened_dict(known)
    return config


def validate(config: ConfigDict) -> None:
    """Check all that can be checked without a device.

    Raises:
      ConfigError: naming the field, its value and what was expected.
    """
    from decent_jax.train import algorithm

    schedule, _ = resolve(config)
    algorithm.transformation(config, schedule, 1.0)


def resolve(config: ConfigDict) -> tuple[topology.Schedule, Plan | None]:
    """The schedule, and the plan if any, of a config in which all but the method is checked.

    A run builds its method itself, once; building it checks it.

    Raises:
      ConfigError: as `validate`.
    """
    fields.check(table_of(config), flat(config))
    if config.algorithm not in METHODS:
        raise ConfigError(
            f"algorithm must be one of {', '.join(METHODS)}, got {shown(config.algorithm)}"
        )
    limits.check(config)
    _check_lengths(config)
    for name, module in (("tensorboard", "tensorboardX"), ("wandb", "wandb")):
        if config.log[name] and importlib.util.find_spec(module) is None:
            raise ConfigError(
                f"log.{name} needs {module}: pip install 'decent_jax[{name}]', or set it to False"
            )
    plan = load_plan(config)
    schedule = make_schedule(config, plan)
    _check_algorithm(config)
    check_cluster(config)
    if config.mesh.fsdp > 1:
        _check_fsdp(config, schedule)
    try:
        tasks.find(config.task).validate(config)
    except OSError as error:  # of a path that is none
        raise ConfigError(f"{shown(error.filename)}: {error.strerror}") from None
    return schedule, plan


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
                f"{name} {size} cannot be shared out over {n} replicas; use a multiple of {n}, or "
                "another num_replicas"
            )
    if (config.batch_size // n) % config.micro_batches:
        raise ConfigError(
            f"a replica's {config.batch_size // n} examples (batch_size {config.batch_size} over "
            f"{n} replicas) cannot be cut into {config.micro_batches} micro_batches"
        )
    if config.lr_schedule.name == "cosine" and not config.epochs:
        warmup, steps_per_epoch = config.lr_schedule.warmup, 0  # once known, it is checked again
        steps = in_steps("lr_schedule.warmup", warmup, steps_per_epoch, config.steps)
        check_warmup(steps, config.steps)


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
    for name, planned, wanted in (
        ("num_replicas", plan.schedule.num_replicas, config.num_replicas),
        ("pipeline.stages", plan.stages, config.pipeline.stages or 1),
    ):
        if planned != wanted:
            raise ConfigError(
                f"cluster.plan {path} is for {planned} {name.partition('.')[2] or 'replicas'}, but "
                f"{name} is {wanted}; plan for this number, or leave cluster.plan out"
            )
    return plan


def config_of_plan(config: ConfigDict, plan: Plan) -> ConfigDict:
    """The config with the plan's ``schedule`` (by its name), ``local_size`` and ``mix_every``."""
    name, local_size = plan.schedule.name, plan.schedule.rounds[0].group_size
    return changed(config, schedule=name, local_size=local_size, mix_every=plan.mix_every)


def changed(config: ConfigDict, **values: Any) -> ConfigDict:
    """A locked copy of a config with other values of some fields."""
    config = ConfigDict(config.to_dict())
    config.update(values)
    return config.lock()


def make_schedule(config: ConfigDict, plan: Plan | None = None) -> topology.Schedule:
    """The gossip schedule (`all_reduce`, which sends no parameters, does not use it).

    Args:
      config: of the run.
      plan: the one that ``cluster.plan`` names, where the caller has read it.
    """
    plan = plan or load_plan(config)
    try:
        schedule = _schedule(config) if plan is None else plan.schedule
        method = METHODS[config.algorithm]
        times = method.phases(numbers_of(config, method))
        return topology.repeat(schedule, times) if times > 1 else schedule
    except ValueError as error:
        if config.algorithm == "all_reduce" and names_a_schedule(config.schedule):
            return topology.make("complete", config.num_replicas)
        raise ConfigError(f"schedule: {error}") from None


def numbers_of(config: ConfigDict, method: Method) -> dict[str, Any]:
    """A method's own numbers, from its section of the config."""
    if not method.numbers:
        return {}
    name = method.config_section
    if name and name not in config:
        raise ConfigError(
            f"the config has no section {name!r}, whose numbers {method.name} needs; import the "
            "module that registers it before default_config() is called"
        )
    section = config[name] if name else config
    return {number: section[number] for number in method.numbers}


def _schedule(config: ConfigDict) -> topology.Schedule:
    """The schedule that ``schedule`` names, or that its file holds."""
    n = config.num_replicas
    if config.schedule == AUTO:
        return topology.make(ONE_HOST, n)
    if config.schedule.endswith(".npy"):
        push_sum = config.algorithm == "push_sum"
        return topology.Schedule.from_file(config.schedule, n, column_stochastic_only=push_sum)
    return topology.make(config.schedule, n, local_size=config.local_size)


def names_a_schedule(text: str) -> bool:
    """Whether there is such a schedule, for whatever number of replicas."""
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


def check_warmup(warmup: int, steps: int) -> None:
    """Raises ConfigError where a cosine would begin after the end of the run."""
    if warmup > steps:
        raise ConfigError(
            f"lr_schedule.warmup of {warmup} steps does not fit into a run of {steps}"
        )


def unknown_field(name: str, known: Mapping[str, object]) -> str:
    """The sentence for a field that does not exist, or no longer under this name."""
    if name not in RENAMED:
        return fields.unknown_field(name, known)
    now, meaning = RENAMED[name]
    return f"{name} is called {now} now: {meaning}"


def under_new_names(saved: Mapping[str, object]) -> dict:
    """The flat config of a run folder, with the names that its fields have now."""
    return {RENAMED.get(name, (name,))[0]: value for name, value in saved.items()}


def refused_changes(old: dict, new: dict) -> list[str]:
    """Fields (flat) that differ and may not change in a resumed run, as "name: old -> new".

    A field that is newer than the old run counts with its default there, one that has been removed
    since (`REMOVED`) with its default here. ``batch_size`` may follow ``num_replicas``, so that a
    replica keeps its share.
    """
    table = {**fields_of(new["task"]), **REMOVED}
    defaults = {name: field.default for name, field in table.items()}
    old, new = defaults | under_new_names(old), defaults | new
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


def _check_algorithm(config: ConfigDict) -> None:
    """Refuse what the method does not have or ignores; building it checks the rest."""
    method = METHODS[config.algorithm]
    if config.algorithm == "all_reduce" and (config.combine or config.mix_every > 1):
        raise ConfigError(
            "all_reduce averages gradients in every step: leave combine empty and mix_every at 1, "
            f"got {config.combine!r} and {config.mix_every}"
        )
    schedule = config.schedule.partition("(")[0].strip()
    sums = config.algorithm in ("push_sum", "all_reduce")
    if schedule in topology.COLUMN_STOCHASTIC and not sums:
        raise ConfigError(
            f"schedule {schedule} is for algorithm push_sum, whose weights need not sum to 1 at a "
            f"receiver; {config.algorithm} needs another, such as one_peer_exp"
        )
    if config.gamma > 1:
        raise ConfigError(f"gamma must be in [0, 1], got {shown(config.gamma)}")
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
        not 0 <= cluster.process_id < cluster.num_processes
        if cluster.coordinator
        else cluster.process_id != -1
    ):
        raise ConfigError(
            "cluster needs coordinator, num_processes and process_id (0 to num_processes - 1) "
            f"together, got {shown(cluster.coordinator)}, {cluster.num_processes} and "
            f"{cluster.process_id}"
        )
    if cluster.num_processes and config.num_replicas % cluster.num_processes:
        raise ConfigError(
            f"{config.num_replicas} replicas cannot be spread evenly over "
            f"{cluster.num_processes} processes"
        )
