"""The parts of a run: everything that a config names, checked and built once."""

import contextlib
import functools
import itertools
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
import optax

from decent_jax import gossip, replicas, tasks
from decent_jax.checkpoints import arrays
from decent_jax.cluster import rendezvous, watch
from decent_jax.cluster import start as cluster
from decent_jax.data import loader, partition
from decent_jax.ground import machine
from decent_jax.ground.errors import ConfigError, DataError
from decent_jax.ground.fields import LARGEST
from decent_jax.ground.format import format_bytes
from decent_jax.ground.pytree import PyTree
from decent_jax.optim import Method
from decent_jax.plan.plan_file import Plan
from decent_jax.replicas import Placement, TrainState
from decent_jax.tasks import Task
from decent_jax.topology import Schedule
from decent_jax.train import algorithm, xla
from decent_jax.train import config as config_lib
from decent_jax.train import step as step_lib
from decent_jax.train.config import AUTO, ONE_HOST, changed, load_saved, make_schedule
from decent_jax.train.same_data import facts_of
from decent_jax.train.settings import Config
from decent_jax.train.workdir import Workdir, open_workdir


class Experiment(NamedTuple):
    """A checked run with everything that training needs."""

    config: Config
    task: Task
    schedule: Schedule
    placement: Placement
    partition: partition.Partition | None  # None: every replica reads all records
    steps: int
    every: dict[str, int]  # durations of the config by field name, in steps
    rate: optax.Schedule
    tx: Method
    hosts: list[str]  # host name of each replica
    per_host: int  # replicas per host (TPU slice); 1 if hosts hold different numbers


@contextlib.contextmanager
def open_experiment(
    config: Config, workdir: str | Path, sharing: int = 1, checked: bool = False
) -> Generator[tuple[Experiment, Workdir]]:
    """Check the config, start jax, open the run directory and build the run.

    Args:
      config: the run's config.
      workdir: the run directory.
      sharing: number of runs that share ``batch_size``; more than 1 only for peers.
      checked: whether another process has already checked that the method fits the model.

    Raises:
      ConfigError: the config, the data or the run directory cannot be used; nothing has been
        compiled or written.
    """
    schedule, plan = config_lib.check(config)
    if plan is not None:
        config = config_lib.config_of_plan(config, plan)
    xla.use_cache()
    started = cluster.start(config, workdir)
    placement = _place(config, plan)
    hosts = hosts_of(placement)
    per_host = replicas_per_host(slices_of(placement) or hosts)
    if config.schedule == AUTO:
        on_gpus = placement.platform in ("gpu", "cuda")
        config = settle(config, per_host, workdir, on_gpus)
        if config.schedule != schedule.name:
            schedule = make_schedule(config)
    with open_workdir(workdir, config) as work:
        try:
            task = tasks.find(config.task).make(config, work.path, work.console.announce)
            shares = _partition(config, task)
        except DataError as error:
            raise ConfigError(str(error)) from None
        other = rendezvous.difference(watch.gather(facts_of(config, task)), cluster.hosts())
        if other is not None:
            raise ConfigError(other, field="data.path", value=getattr(config.data, "path", ""))
        steps, every, rate = durations(config, task)
        tx = algorithm.transformation(config, schedule, rate, task.decay_mask, placement.axis_name)
        if not checked:
            _check_fits_the_model(config, task, tx, rate, placement)
        check_batch(config, task.train_source, sharing * jax.process_count(), _on_this_host())
        if config.data.on_device:
            _check_on_device(task.train_source, tx, placement)
        # Printed only now, because a refused run prints only the reason.
        work.console.accept()
        run = Experiment(
            config, task, schedule, placement, shares, steps, every, rate, tx, hosts, per_host
        )
        work.console.say("\n".join([started, *_devices_used(run)]))
        yield run, work


def _devices_used(run: Experiment) -> Iterator[str]:
    """Log lines: which device holds which replicas, and how the records are partitioned."""
    placement, used, there = run.placement, run.placement.mesh.devices.size, jax.device_count()
    if placement.num_replicas > 1:
        devices = list(placement.mesh.devices.reshape(-1, placement.fsdp)[:, 0])
        yield cluster.table(devices, placement.block)
    if used < there and not run.config.mesh.devices:
        yield (
            f"{used} of {there} devices are used and the others are idle: set num_replicas to a "
            f"multiple of {there // placement.fsdp}"
        )
    if placement.fsdp > 1:
        yield f"a replica is sharded over {placement.fsdp} devices; the table names the first"
    if run.partition is not None:
        yield run.partition.report()


def _place(config: Config, plan: Plan | None) -> Placement:
    """Place the replicas on devices, in the order of the plan if there is one."""
    fsdp = config.mesh.fsdp
    devices = cluster.choose_devices(config.num_replicas * fsdp, config.mesh.devices)
    if plan is not None:
        devices = cluster.follow_plan(devices, plan)
    try:
        return replicas.place(config.num_replicas, devices, fsdp)
    except ValueError as error:
        raise ConfigError(f"mesh.fsdp: {error}", field="mesh.fsdp", value=fsdp) from None


def _partition(config: Config, task: Task) -> partition.Partition | None:
    """Partition the training records among replicas; None: every replica reads all of them.

    The partition is drawn from the seed at every start, so a resumed run gets the same one unless
    its number of replicas has changed.
    """
    if config.data.partition == "iid":
        return None
    return partition.for_run(
        task.train_source,
        num_replicas=config.num_replicas,
        batch_size=config.batch_size,
        alpha=config.data.alpha,
        seed=config.seed,
    )


def durations(config: Config, task: Task) -> tuple[int, dict[str, int], optax.Schedule]:
    """The number of steps, the other durations in steps by field name, and the learning rate."""
    epoch = loader.steps_per_epoch(
        task.train_source, config.batch_size, config.num_replicas, config.seed
    )
    steps = round(config.epochs * epoch) if config.epochs else config.steps
    if steps < 1:
        raise ConfigError.about("epochs", config.epochs, f"must be at least one step, 1 / {epoch}")
    if steps > LARGEST[int]:
        wanted = f"must be at most {LARGEST[int]} steps, at {epoch} per epoch"
        raise ConfigError.about("epochs", config.epochs, wanted)
    if config.mix_every > steps:
        wanted = f"must be at most {steps}, the steps of the run, or replicas never average"
        raise ConfigError.about("mix_every", config.mix_every, wanted)
    every = config_lib.durations(config, epoch, steps)
    warmup = every["lr_schedule.warmup"]
    if config.lr_schedule.name in ("cosine", "linear"):
        config_lib.check_warmup(warmup, steps)
    drops = config_lib.drops_in_steps(config, epoch, steps)
    return steps, every, step_lib.learning_rate(config, steps, warmup, drops)


# --- The schedule that suits the hosts ------------------------------------------------------------

# Links between hosts are slow, links inside a host are fast. If every host holds the same number
# k > 1 of replicas, averaging inside the hosts first sends one model per host and round, whereas
# `ONE_HOST` sends up to k. The planner, which knows the links, makes the same choice if a host can
# send about one model per step. On slower links it skips rounds, and on faster links it sends more
# models (tests/train/test_hosts.py).
WITHIN_HOSTS = "hierarchical(complete, one_peer_exp)"
# As good as `ONE_HOST`, but only for 2^k replicas; XLA on GPUs then needs only communicators of two
# devices.
PAIRS = "hypercube"


def hosts_of(placement: Placement) -> list[str]:
    """The host name of each replica; all processes must call this at the same point."""
    names = cluster.hosts()
    return [names[device.process_index] for device in placement.device_of_each]


def slices_of(placement: Placement) -> list[int] | None:
    """The slice of each replica on TPUs, None elsewhere.

    Schedules treat a slice as a host: its hosts share a fast network, whereas slices are connected
    by a slow one.
    """
    if placement.platform != "tpu":
        return None
    return [getattr(device, "slice_index", 0) for device in placement.device_of_each]


def replicas_per_host(hosts: Sequence[object]) -> int:
    """Replicas per host, if all hosts hold the same number of consecutive replicas; otherwise 1.

    >>> replicas_per_host("aabb"), replicas_per_host("abab"), replicas_per_host("aab")
    (2, 1, 1)
    """
    sizes = {len(list(same)) for _, same in itertools.groupby(hosts)}
    return sizes.pop() if len(sizes) == 1 else 1


def settle(config: Config, per_host: int, folder: str | Path, on_gpus: bool = False) -> Config:
    """Replace the schedule ``auto`` in a config, and set ``replicas_per_node`` to match.

    A run in ``folder`` with the same number of replicas keeps its schedule. A new run gets
    `WITHIN_HOSTS` on several hosts with ``per_host`` > 1 replicas each, else `PAIRS` on GPUs. In
    all other cases, or if the method or a sharded replica rules these out, it gets `ONE_HOST`.
    """
    with contextlib.suppress(ConfigError):  # no run there; a damaged one is refused later
        saved = load_saved(folder)
        if saved.num_replicas == config.num_replicas and saved.schedule != AUTO:
            return changed(
                config, schedule=saved.schedule, replicas_per_node=saved.replicas_per_node
            )
    n = config.num_replicas
    if config.algorithm != "all_reduce":
        if 1 < per_host < n and config.mesh.fsdp == 1:
            within = changed(config, schedule=WITHIN_HOSTS, replicas_per_node=per_host)
            if _is_possible(within):
                return within
        pairs = changed(config, schedule=PAIRS)
        if on_gpus and n > 2 and _is_possible(pairs):
            return pairs
    return changed(config, schedule=ONE_HOST)


def _is_possible(config: Config) -> bool:
    """Whether the config's method accepts its schedule."""
    try:
        algorithm.transformation(config, make_schedule(config), 1.0)
    except ConfigError:
        return False
    return True


# --- Data and memory ------------------------------------------------------------------------------


def train_batches(
    config: Config,
    task: Task,
    placement: Placement,
    start_step: int,
    partition: partition.Partition | None = None,
) -> loader.Batches:
    """The training batches of this process from ``start_step`` on."""
    source = task.train_source
    if partition is not None and not hasattr(source, "train_blocks"):
        source = loader.Partitioned(source, partition)
    return loader.train_batches(
        source,
        seed=config.seed,
        num_replicas=config.num_replicas,
        batch_size=config.batch_size,
        replicas=placement.local_replicas,
        start_step=start_step,
        prefetch=config.data.prefetch,
        workers=config.data.workers,
    )


def _check_fits_the_model(
    config: Config, task: Task, tx: Method, rate: optax.Schedule, placement: Placement
) -> None:
    """Refuse a run too large for this machine, and a method that does not fit the parameters."""
    params, model_state = jax.eval_shape(task.init, jax.random.key(0))
    algorithm.check_optimizer(config, rate, params)

    def init(params: PyTree, model_state: PyTree):
        if task.mixes_state:
            gossip.mixable({"model_state": model_state})
        return tx.init(params)

    try:
        opt_state = jax.eval_shape(init, params, model_state)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"algorithm {config.algorithm}: {error}", field="algorithm", value=config.algorithm
        ) from None
    arrays.check(TrainState(params, model_state, opt_state))
    check_state(placement, (params, opt_state), _on_this_host())


def _on_this_host() -> int:
    """The number of this run's processes on this machine, which share its memory."""
    names = cluster.hosts()
    return names.count(names[jax.process_index()])


def check_state(placement: Placement, state: PyTree, together: int = 1) -> None:
    """Check that this machine can hold the replicas of its processes.

    Args:
      placement: the replicas and their devices.
      state: shapes of one replica's parameters and of its method's state.
      together: number of the run's processes on this machine.
    """
    each = algorithm.bytes_of(state)
    count = len(placement.local_replicas) * together
    if placement.platform == "cpu":  # other devices themselves report a lack of memory
        machine.check_memory(count * each, f"the state of {count} replicas on this machine")


def _check_on_device(source: Sequence[PyTree], tx: Method, placement: Placement) -> None:
    """Refuse a run whose training records cannot stay on its devices."""
    refusal = functools.partial(ConfigError.about, "data.on_device")
    if jax.process_count() > 1 or tx.delayed:
        why = "must be False with several processes, and with messages that overlap several steps"
        raise refusal(True, why)
    if not loader.is_fixed(source):
        why = f"must be False: {type(source).__name__} returns other records at every visit"
        raise refusal(True, why)
    size = loader.bytes_of_all(source)
    limits: dict[str, int] = placement.mesh.devices.flat[0].memory_stats() or {}
    there = limits.get("bytes_limit")
    if there is None:
        machine.check_memory(size * placement.mesh.devices.size, "data.on_device")
    elif size > there // 2:
        why = (
            f"must be False: records take {format_bytes(size)}, a device has {format_bytes(there)}"
        )
        raise refusal(True, why)


def check_batch(
    config: Config, source: Sequence[PyTree], processes: int, together: int = 1
) -> None:
    """Check that there are enough examples, and that the prefetched batches fit into memory.

    Args:
      config: the run's config.
      source: the training examples.
      processes: number of processes that share a batch.
      together: number of these processes on this machine.
    """
    if hasattr(source, "train_blocks") or not len(source):  # counts tokens, not examples
        return
    if config.batch_size > len(source):
        wanted = f"must be at most {len(source)}, the number of training examples"
        raise ConfigError.about("batch_size", config.batch_size, wanted)
    machine.check_memory(
        together * bytes_ahead(config, source, processes),
        f"batch_size {config.batch_size}, with data.prefetch {config.data.prefetch},",
    )


def bytes_ahead(config: Config, source: Sequence[PyTree], processes: int) -> int:
    """Bytes of the batches that each of ``processes`` holds; 0 if that is not known."""
    if hasattr(source, "train_blocks") or not len(source):  # counts tokens, not examples
        return 0
    try:
        example = algorithm.bytes_of(jax.tree.map(np.asarray, source[0]))
    except DataError:  # the run reports it, with the step at which it reads this record
        return 0
    return config.batch_size // processes * example * (config.data.prefetch + 1)
