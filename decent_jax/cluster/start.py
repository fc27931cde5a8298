"""Start jax in one process or several, as the section ``cluster`` of a config specifies."""

import collections
import contextlib
import os
import re
import socket
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax._src import xla_bridge  # no public function tells whether jax has been used

from decent_jax.cluster import launchers, rendezvous, watch
from decent_jax.cluster.supervise import end_with_supervisor
from decent_jax.ground.errors import ConfigError, PeerLost
from decent_jax.ground.fields import changeable, check_rules
from decent_jax.ground.format import printable
from decent_jax.ground.progress import announce
from decent_jax.plan.plan_file import Plan


@dataclass(frozen=True)
class Cluster:
    """How processes find each other; see docs/clusters.md."""

    coordinator: str = changeable(
        "", '"host:port" of process 0; empty: detect SLURM, Open MPI, Kubernetes, TPUs'
    )
    num_processes: int = changeable(0, "number of processes", at_least=0)
    process_id: int = changeable(-1, "number of this process, from 0", at_least=-1)
    plan: str = changeable("", "plan file: order of devices, schedule, mix_every")
    timeout_s: int = changeable(300, "seconds that start-up waits for all processes", at_least=1)
    heartbeat_s: int = changeable(30, "seconds until a silent process counts as lost", at_least=1)
    exchange_s: int = changeable(600, "timeout of a message, in seconds", at_least=1)


# Settings of jax that change the results of the same program with the same seed.
_ALIKE = ("jax_enable_x64", "jax_default_prng_impl", "jax_threefry_partitionable")
_ALIKE += ("jax_default_matmul_precision",)
_hosts: list[str] = []  # the host name of every process; empty before `start`


def check(config: Any) -> None:
    """Raise ConfigError if the fields of ``cluster`` contradict each other."""
    own: Cluster = config.cluster
    count = own.num_processes
    index = range(count) if own.coordinator else (-1,)
    together = bool(own.coordinator) == (count > 0) and own.process_id in index
    alone = "must be from 0 to num_processes - 1 and come with coordinator, or leave all out"
    even = count == 0 or config.num_replicas % count == 0
    check_rules(
        config,
        (together, "cluster.process_id", alone),
        (even, "cluster.num_processes", f"must divide num_replicas, {config.num_replicas}"),
    )


def start(config: Any, folder: str | Path = ".") -> str:
    """Start jax as configured in ``config.cluster``; returns a line for the log.

    Joins other processes if the config names a coordinator, if SLURM (`srun`), Open MPI or
    Kubernetes started this process together with others, or on a Cloud TPU pod. All processes first
    pass the start-up barrier (`rendezvous`), which checks that they run the same config and
    versions; from then on, they watch each other (`watch`). A launcher that is detected but cannot
    be used is an error. A second call in a process changes nothing.

    Args:
      config: the run's config.
      folder: a folder that all processes see, in which they find their secret (`rendezvous`).

    Raises:
      ConfigError: processes do not connect, or differ in config or versions.
      PeerLost: jax could not join the processes, although all had connected.
    """
    cluster = config.cluster
    end_with_supervisor(cluster.heartbeat_s)
    _threads_for_simulated_devices()
    launcher = launchers.detect_launcher()
    if jax.distributed.is_initialized():
        return f"process {jax.process_index()} of {jax.process_count()}"
    if not cluster.coordinator and launcher is None:
        launchers.check_unread(1)
        open_devices()
        return "one process (no coordinator in the config, no launcher detected)"
    place = _place(cluster, launcher)
    if not cluster.coordinator:
        launchers.check_unread(place.count)
    if xla_bridge.backends_are_initialized():
        why = "must be left out if the config file or the task has used jax, which can then no "
        why += "longer join other processes; use jax only in functions that are called later"
        raise ConfigError.about("cluster.coordinator", cluster.coordinator, why)
    _join(place, config, folder)
    addresses = watch.gather(_address_of(socket.gethostname()))
    if jax.default_backend() == "cpu":  # gloo listens at the address of the host name
        check_addresses(_hosts, addresses)
    how = f"coordinator {cluster.coordinator}" if cluster.coordinator else launcher
    return f"process {jax.process_index()} of {jax.process_count()} ({how})"


def _join(place: "_Place", config: Any, folder: str | Path) -> None:
    """Pass the start-up barrier, connect jax to the other processes, and watch them."""
    cluster = config.cluster
    check_interface(os.environ.get("NCCL_SOCKET_IFNAME", ""))
    # CPU devices of several processes exchange data over gloo; GPUs ignore this setting.
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    limit_exchanges(cluster.exchange_s)
    waiting = f"waiting for {place.count} processes at {place.address}"
    with announce(waiting, quiet=place.index != 0):
        description = rendezvous.describe(config.by_name)
        description |= {name.upper(): str(jax.config.values[name]) for name in _ALIKE}
        _hosts[:] = rendezvous.barrier(
            place.address, place.count, place.index, description, cluster.timeout_s, folder
        )
    jax.config.update("jax_enable_recoverability", True)  # for `watch`
    jax.config.update("jax_enable_preemption_service", False)  # it would catch SIGTERM
    try:
        jax.distributed.initialize(
            place.address,
            place.count,
            place.index,
            local_device_ids=place.devices,
            cluster_detection_method="deactivate",
            initialization_timeout=cluster.timeout_s,
            heartbeat_timeout_seconds=cluster.heartbeat_s,
        )
    except jax.errors.JaxRuntimeError as error:
        line = str(error).partition("\n")[0]
        raise PeerLost(f"all processes connected, but jax could not join them: {line}") from None
    watch.watch(_hosts, cluster.heartbeat_s)
    open_devices()


class _Place(NamedTuple):
    """The index of a process, and the address at which the processes find each other."""

    address: str  # host:port of process 0
    count: int
    index: int
    devices: Sequence[int] | None  # numbers of this host's devices to use; None: all devices


def _place(cluster: Cluster, launcher: str | None) -> _Place:
    """The place from the config, or as jax detects it from the launcher's variables."""
    listed = os.environ.get("JAX_LOCAL_DEVICE_IDS", "")
    devices = [
        launchers.number_in("JAX_LOCAL_DEVICE_IDS", word) for word in listed.split(",") if listed
    ] or None
    if cluster.coordinator:
        return _Place(cluster.coordinator, cluster.num_processes, cluster.process_id, devices)
    # `jax.distributed.initialize` detects the launcher only while it connects, but the start-up
    # barrier needs the address earlier. When jax offers this publicly, use that.
    from jax._src.clusters import ClusterEnv, OmpiCluster

    try:
        with warnings.catch_warnings(action="ignore"):  # such as one about a Kubernetes package
            detected = ClusterEnv.auto_detect_unset_distributed_params(
                *(os.environ.get("JAX_COORDINATOR_ADDRESS"), None, None, devices, None),
                cluster.timeout_s,
            )
    except (RuntimeError, KeyError, ValueError) as error:
        raise ConfigError(
            f"{launcher} started this process, but its variables cannot be used "
            f"({type(error).__name__}: {error}); {launchers.BY_HAND}"
        ) from None
    address, count, index, of_its_number = detected
    devices = devices if launchers.shows_own_devices(launcher) else of_its_number
    # jax may have detected another launcher instead, for instance SLURM.
    another = launcher == "Open MPI" and not OmpiCluster.is_env_present()
    if another or address is None or count is None or index is None:
        raise ConfigError(
            f"{launcher} started this process, but jax does not know how to find the others; "
            f"{launchers.BY_HAND}"
        )
    if launcher == "SLURM":
        count = launchers.size_of(launcher) or count
        host = launchers.first_host(
            os.environ.get("SLURM_STEP_NODELIST", "")
        )  # jax expands only one bracket
        if host and "JAX_COORDINATOR_ADDRESS" not in os.environ:
            address = f"{host}:{address.rpartition(':')[2]}"
    if index not in range(count):
        raise ConfigError(
            f"{launcher} started this process as number {index} of {count}, counted from 0; "
            f"{launchers.BY_HAND}"
        )
    return _Place(address, count, index, devices)


def check_interface(wanted: str) -> None:
    """Check that this host has a network card that ``NCCL_SOCKET_IFNAME`` allows.

    Args:
      wanted: names separated by commas, each the beginning of a card's name (``eth``); with a
        leading ``=`` the names are exact, with a leading ``^`` such cards are excluded.

    Raises:
      ConfigError: no card fits. NCCL would fail only at the first exchange, and the other processes
        would hang.
    """
    cards = [name for _, name in socket.if_nameindex()]
    excluded, names = wanted.startswith("^"), wanted.removeprefix("^")
    exact, names = names.startswith("="), names.removeprefix("=").split(",")

    def fits(card: str) -> bool:
        return any(card == name if exact else card.startswith(name) for name in names)

    if wanted and not any(fits(card) != excluded for card in cards):
        why = f"must name a network card of {socket.gethostname()}, which has {', '.join(cards)}"
        raise ConfigError.about("NCCL_SOCKET_IFNAME", wanted, why)


def check_addresses(hosts: Sequence[str], addresses: Sequence[str]) -> None:
    """Raise ConfigError if one of several hosts resolves its own name to a loopback address.

    Args:
      hosts: host name of each process.
      addresses: the address to which each process resolves its host name.
    """
    for host, address in zip(hosts, addresses, strict=True):
        if len(set(hosts)) > 1 and address.startswith("127."):
            raise ConfigError(
                f"{host} resolves its own name to {address}, where no other host can reach it; in "
                f"/etc/hosts there, give {host} the address that the others know"
            )


def _address_of(host: str) -> str:
    with contextlib.suppress(OSError):
        return socket.gethostbyname(host)
    return ""


def check_settings() -> None:
    """Raise ConfigError if settings of jax change what a step computes, or block its transfers."""
    wanted_as = {"jax_disable_jit": False, "jax_no_tracing": False}
    for name, usual in (wanted_as | {"jax_numpy_dtype_promotion": "standard"}).items():
        value = jax.config.values[name]
        if value != usual:
            wanted = f"must be {str(usual).lower()}, the default: compiled steps rely on it"
            raise ConfigError.about(name.upper(), value, wanted)
    for way in ("", "_host_to_device", "_device_to_device", "_device_to_host"):
        name = f"jax_transfer_guard{way}"
        if str(jax.config.values[name]).startswith("disallow"):
            why = "must allow batches to go to the devices, and metrics to come back"
            raise ConfigError.about(name.upper(), jax.config.values[name], why)


def open_devices() -> None:
    """Let jax open its devices; raises ConfigError if it finds none of the wanted kind."""
    try:
        jax.local_devices()
    except Exception as error:  # RuntimeError, or an assertion of jax
        why = (str(error).splitlines() or [""])[0] or "it finds none"
        wanted = f"must name devices that jax finds on this host ({why})"
        raise ConfigError.about(
            "JAX_PLATFORMS", jax.config.values["jax_platforms"], wanted
        ) from error


def limit_exchanges(seconds: int) -> None:
    """Time out collectives between processes after ``seconds``; on GPUs the default is no timeout.

    Call it before jax creates the first device, when XLA reads its flags. Timeouts that the user
    has set are kept.
    """
    flags = os.environ.get("XLA_FLAGS", "")
    for name in ("xla_cpu_collective_timeout_seconds", "xla_gpu_nccl_termination_timeout_seconds"):
        if name not in flags:
            flags += f" --{name}={seconds}"
    os.environ["XLA_FLAGS"] = flags.strip()


def _threads_for_simulated_devices() -> None:
    """Let simulated CPU devices wait for each other, if the environment asks jax for several.

    Each device that waits in a collective holds a thread of a pool as large as the core count. With
    fewer cores than devices, no thread would be left for the device that the others wait for.
    """
    flag = re.search(r"device_count=(\d+)", os.environ.get("XLA_FLAGS", ""))
    count = max(jax.config.values["jax_num_cpu_devices"], int(flag[1]) if flag else 0)
    if count > 1:
        os.environ.setdefault("PJRT_NPROC", str(max(4 * count, os.cpu_count() or 1)))


def choose_devices(
    num_replicas: int, wanted: int, by_process: Sequence[Sequence[jax.Device]] | None = None
) -> list[jax.Device]:
    """Devices for the replicas, ordered by process, the same number from each process.

    Args:
      num_replicas: number of replicas, times the devices per replica if they are sharded.
      wanted: number of devices; 0 takes the largest number that divides ``num_replicas``.
      by_process: the devices of each process; None: all devices of this program.

    Raises:
      ConfigError: ``wanted`` does not fit the replicas and processes; with 0, no number does.
    """
    if by_process is None:
        by_process = [jax.local_devices(process_index=p) for p in range(jax.process_count())]
    processes, available = len(by_process), min(map(len, by_process))
    if wanted == 0:
        fitting = [k for k in range(1, available + 1) if num_replicas % (k * processes) == 0]
        if not fitting:
            why = f"must be a multiple of the {processes} processes"
            raise ConfigError.about("num_replicas", num_replicas, why)
        each = fitting[-1]
    else:
        if wanted % processes or num_replicas % wanted or wanted // processes > available:
            why = f"must be a multiple of the {processes} processes, divide the {num_replicas} "
            why += f"replicas and be at most {available * processes}"
            raise ConfigError.about("mesh.devices", wanted, why)
        each = wanted // processes
    ordered = [sorted(devices, key=lambda d: d.id)[:each] for devices in by_process]
    return [device for devices in ordered for device in devices]


def follow_plan(devices: list[jax.Device], plan: Plan) -> list[jax.Device]:
    """The devices in the order of the plan's replicas, one replica on each.

    The plan names a device ``host/k``, as `device_names` does.

    Raises:
      ConfigError: the plan is for other devices, or for a different number of devices.
    """
    names = device_names(devices)
    try:
        return [devices[k] for k in plan.device_order(names)]
    except ValueError as error:
        raise ConfigError(f"cluster.plan: {error}") from None


def device_names(devices: list[jax.Device]) -> list[str]:
    """``host/k`` for every device, where k counts the host's devices in the given order."""
    names_of = hosts()
    seen = collections.Counter()
    names = []
    for device in devices:
        host = names_of[device.process_index]
        names.append(f"{host}/{seen[host]}")
        seen[host] += 1
    return names


def table(devices: list[jax.Device], block: int) -> str:
    """A table of the replicas on each device of each host, one line per device."""
    names_of = hosts()
    lines = ["replicas  process  host                  device"]
    for k, device in enumerate(devices):
        last = (k + 1) * block - 1
        replicas = f"{k * block}" if block == 1 else f"{k * block}-{last}"
        process = device.process_index
        # jax counts the CPUs of process p from 2048 p.
        own = jax.local_devices(process_index=process).index(device)
        name = f"{device.platform}:{own}"
        lines.append(f"{replicas:<8}  {process:<7}  {names_of[process]:<20}  {name}")
    return "\n".join(lines)


def hosts() -> list[str]:
    """The host name of every process; all processes must call this at the same point."""
    if len(_hosts) == jax.process_count():
        return list(_hosts)
    # The user's own program has connected jax.
    return [printable(name) for name in watch.gather(socket.gethostname())]


def any_process(flag: bool) -> bool:
    """Whether any process passes True; all processes must call this at the same point."""
    return any(watch.gather(flag))
