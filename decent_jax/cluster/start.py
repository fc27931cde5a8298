"""Starting jax on one process or many, and what processes have to agree on."""

import collections
import contextlib
import os
import socket
from collections.abc import Iterator
from typing import NamedTuple

import jax
import numpy as np
from jax.experimental import multihost_utils

from decent_jax.cluster import rendezvous, watch
from decent_jax.errors import ConfigError
from decent_jax.progress import announce
from decent_jax.topology.plan_file import Plan

# Variables by which a launcher is recognised, with the number of processes where it says it.
_LAUNCHERS = {
    "SLURM": ("SLURM_STEP_ID", "SLURM_NTASKS"),
    "Open MPI": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    "Kubernetes": ("JOB_COMPLETION_INDEX", None),
}
_met: list[str] = []  # the hosts of the processes that this one has met, by process


def start(config) -> str:
    """Start jax as ``config.cluster`` and ``config.mesh`` say; returns a line for the log.

    Processes are joined when the config names a coordinator, or when SLURM (`srun`), Open MPI or
    Kubernetes started this process with others. They meet first (`rendezvous`), so that all of them
    run the same config and versions, and from then on watch each other (`watch`). Nothing is tried
    and swallowed: a launcher that is there but does not work is an error. A second call in a
    process changes nothing.

    Raises:
      ConfigError: simulated devices asked for after jax has started with others; processes that do
        not come or do not fit together.
    """
    cluster = config.cluster
    if config.mesh.simulate:
        _simulate(config.mesh.simulate)
    launcher = detect_launcher()
    if jax.distributed.is_initialized():
        return f"process {jax.process_index()} of {jax.process_count()}"
    if not cluster.coordinator and launcher is None:
        return "one process (no coordinator in the config, no launcher detected)"
    place = _place(cluster, launcher)
    check_interface(os.environ.get("NCCL_SOCKET_IFNAME", ""))
    # CPU devices of several processes talk over gloo; without a CPU cluster it has no effect.
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    _limit_exchanges(cluster.exchange_s)
    waiting = f"waiting for {place.count} processes at {place.address}"
    with announce(waiting, quiet=place.index != 0):
        facts = rendezvous.facts_of(config)
        _met[:] = rendezvous.meet(place.address, place.count, place.index, facts, cluster.timeout_s)
    watch.watch(_met, cluster.heartbeat_s)
    jax.distributed.initialize(
        place.address,
        place.count,
        place.index,
        local_device_ids=place.devices,
        cluster_detection_method="deactivate",
        initialization_timeout=cluster.timeout_s,
        heartbeat_timeout_seconds=cluster.heartbeat_s,
    )
    how = f"coordinator {cluster.coordinator}" if cluster.coordinator else launcher
    return f"process {jax.process_index()} of {jax.process_count()} ({how})"


class _Place(NamedTuple):
    """Where a process stands among the others."""

    address: str  # host:port of process 0
    count: int
    index: int
    devices: list[int] | None  # of this host, that are this process's; None: all


def _place(cluster, launcher: str | None) -> _Place:
    """As the config says, or as jax finds out from the launcher's variables."""
    devices = os.environ.get("JAX_LOCAL_DEVICE_IDS")
    devices = [int(number) for number in devices.split(",")] if devices else None
    if cluster.coordinator:
        return _Place(cluster.coordinator, cluster.num_processes, cluster.process_id, devices)
    from jax._src.clusters import ClusterEnv  # what jax.distributed.initialize() asks

    try:
        found = ClusterEnv.auto_detect_unset_distributed_params(
            os.environ.get("JAX_COORDINATOR_ADDRESS"), None, None, devices, None, cluster.timeout_s
        )
    except (RuntimeError, KeyError, ValueError) as error:
        raise ConfigError(
            f"{launcher} started this process, but its variables cannot be used "
            f"({type(error).__name__}: {error}); set cluster.coordinator, cluster.num_processes "
            "and cluster.process_id"
        ) from None
    if None in found[:3]:
        raise ConfigError(
            f"{launcher} started this process, but jax does not know how to find the others; set "
            "cluster.coordinator, cluster.num_processes and cluster.process_id"
        )
    return _Place(*found)


def check_interface(wanted: str) -> None:
    """Whether this host has a network card that ``NCCL_SOCKET_IFNAME`` allows.

    Names are beginnings (``eth``), exact after ``=``, and excluded after ``^``; commas between.

    Raises:
      ConfigError: it has none. NCCL would say so only at the first exchange, and hang others.
    """
    cards = [name for _, name in socket.if_nameindex()]
    excluded, names = wanted.startswith("^"), wanted.removeprefix("^")
    exact, names = names.startswith("="), names.removeprefix("=").split(",")

    def fits(card):
        return any(card == name if exact else card.startswith(name) for name in names)

    if wanted and not any(fits(card) != excluded for card in cards):
        raise ConfigError(
            f"NCCL_SOCKET_IFNAME is {wanted!r}, but {socket.gethostname()} has no such network "
            f"card, only {', '.join(cards)}"
        )


def _limit_exchanges(seconds: int) -> None:
    """An exchange between processes that takes so long fails; by default none ever does on a GPU.

    XLA reads its flags when the first device is asked for; those that the user has set stay.
    """
    flags = os.environ.get("XLA_FLAGS", "")
    for name in ("xla_cpu_collective_timeout_seconds", "xla_gpu_nccl_termination_timeout_seconds"):
        if name not in flags:
            flags += f" --{name}={seconds}"
    os.environ["XLA_FLAGS"] = flags.strip()


@contextlib.contextmanager
def lost_peers_told() -> Iterator[None]:
    """Inside, an error that comes of a lost process becomes a sentence that names it.

    Raises:
      PeerLost: an exchange failed and nobody is known to be lost.
    """
    try:
        yield
    except Exception as error:
        watch.await_verdict(error)
        raise


def detect_launcher() -> str | None:
    """The launcher that started this process together with others, if any."""
    for name, (variable, size) in _LAUNCHERS.items():
        if variable in os.environ and (size is None or int(os.environ.get(size, "1")) > 1):
            return name
    return None


def _simulate(count: int) -> None:
    # Each device that waits in a collective holds a thread of a pool as large as the core count:
    # with fewer cores than devices they would wait for ever (DESIGN 4.13).
    os.environ.setdefault("PJRT_NPROC", str(max(4 * count, os.cpu_count() or 1)))
    try:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", count)
    except RuntimeError:
        if len(jax.local_devices()) != count:
            raise ConfigError(
                f"mesh.simulate = {count} must be set before jax starts; this process already has "
                f"{len(jax.local_devices())} devices"
            ) from None


def choose_devices(num_replicas: int, wanted: int) -> list[jax.Device]:
    """Devices for the replicas, in the order of processes, as many from each.

    ``wanted = 0`` takes the largest number that divides ``num_replicas``.

    Raises:
      ConfigError: no such number, or processes with too few devices.
    """
    processes = jax.process_count()
    by_process = [jax.local_devices(process_index=p) for p in range(processes)]
    available = min(map(len, by_process))
    if wanted == 0:
        fitting = [k for k in range(1, available + 1) if num_replicas % (k * processes) == 0]
        if not fitting:
            raise ConfigError(
                f"{num_replicas} replicas cannot be spread evenly over {processes} processes"
            )
        each = fitting[-1]
    else:
        if wanted % processes or num_replicas % wanted or wanted // processes > available:
            raise ConfigError(
                f"mesh.devices {wanted} must be a multiple of the {processes} processes, divide "
                f"the {num_replicas} replicas and be at most {available * processes}"
            )
        each = wanted // processes
    ordered = [sorted(devices, key=lambda d: d.id)[:each] for devices in by_process]
    return [device for devices in ordered for device in devices]


def follow_plan(devices: list[jax.Device], plan: Plan) -> list[jax.Device]:
    """The devices in the order of the plan's replicas, one on each.

    A device is called ``host/k``, the k-th of its host's (by process, then device id); so does
    the network that the plan was made for.

    Raises:
      ConfigError: the plan is for other devices, or for another number of them.
    """
    names = device_names(devices)
    try:
        return [devices[k] for k in plan.device_order(names)]
    except ValueError as error:
        raise ConfigError(f"cluster.plan: {error}") from None


def device_names(devices: list[jax.Device]) -> list[str]:
    """``host/k`` of every device, k counting the devices of a host."""
    names_of = hosts()
    seen = collections.Counter()
    names = []
    for device in devices:
        host = names_of[device.process_index]
        names.append(f"{host}/{seen[host]}")
        seen[host] += 1
    return names


def table(devices: list[jax.Device], block: int) -> str:
    """Which replicas live on which device of which host, one line a device."""
    names_of = hosts()
    lines = ["replicas  process  host                  device"]
    for k, device in enumerate(devices):
        last = (k + 1) * block - 1
        replicas = f"{k * block}" if block == 1 else f"{k * block}-{last}"
        host = names_of[device.process_index]
        lines.append(f"{replicas:<8}  {device.process_index:<7}  {host:<20}  {device}")
    return "\n".join(lines)


def hosts() -> list[str]:
    """The host name of every process; all processes must call it at the same point."""
    if len(_met) == jax.process_count():
        return list(_met)
    width = 64
    name = socket.gethostname().encode()[:width].ljust(width)
    names = [name]
    if jax.process_count() > 1:  # joined by somebody else than `start`
        names = multihost_utils.process_allgather(np.frombuffer(name, np.uint8)).tobytes()
        names = [names[i : i + width] for i in range(0, len(names), width)]
    return [name.decode(errors="replace").strip() for name in names]


def any_process(flag: bool) -> bool:
    """Whether the flag is set on any process; all processes must call it at the same point."""
    if jax.process_count() == 1:
        return flag
    return bool(multihost_utils.process_allgather(np.array(flag)).any())
