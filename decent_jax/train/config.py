"""The fields of a config, and every check of them that needs no device.

A config is an `ml_collections.ConfigDict` with the same fields for every task, but for those of
``model`` and ``data``, which the task declares.
"""

import importlib.util
import inspect
import re
from collections.abc import Mapping

from ml_collections import ConfigDict

from decent_jax import fields, tasks, topology
from decent_jax.errors import ConfigError
from decent_jax.fields import Field, in_steps, parse_duration
from decent_jax.json_files import flat
from decent_jax.optim import METHODS, Method
from decent_jax.topology import plan_file
from decent_jax.topology.plan_file import Plan
from decent_jax.train.config_table import FIELDS, REMOVED


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


def validate(config: ConfigDict) -> None:
    """Check all that can be checked without a device.

    Raises:
      ConfigError: naming the field, its value and what was expected.
    """
    from decent_jax.train import algorithm

    schedule, _ = resolve(config)
    try:
        algorithm.transformation(config, schedule, 1.0)
    except ValueError as error:
        raise ConfigError(str(error)) from None


def resolve(config: ConfigDict) -> tuple[topology.Schedule, Plan | None]:
    """The schedule, and the plan if any, of a config in which all but the method is checked.

    A run builds its method later, once, for its devices; building it checks it.

    Raises:
      ConfigError: as `validate`.
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
    plan = load_plan(config)
    schedule = make_schedule(config, plan)
    _check_algorithm(config)
    check_cluster(config)
    if config.mesh.fsdp > 1:
        _check_fsdp(config, schedule)
    tasks.find(config.task).validate(config)
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


def config_of_plan(config: ConfigDict, plan: Plan) -> ConfigDict:
    """The config with the plan's ``schedule`` (by its name), ``local_size`` and ``mix_every``."""
    config = ConfigDict(config.to_dict())
    config.schedule = plan.schedule.name
    config.local_size = plan.schedule.rounds[0].group_size
    config.mix_every = plan.mix_every
    return config.lock()


def make_schedule(config: ConfigDict, plan: Plan | None = None) -> topology.Schedule:
    """The gossip schedule (`all_reduce`, which sends no parameters, does not use it).

    Args:
      config: of the run.
      plan: the one that ``cluster.plan`` names, where the caller has read it.
    """
    plan = plan or load_plan(config)
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


def _check_algorithm(config: ConfigDict) -> None:
    """Refuse numbers that the method does not have; building it checks the rest."""
    method = METHODS[config.algorithm]
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
