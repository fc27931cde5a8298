"""Starting jax on one process or many, and what processes have to agree on."""

import collections
import os
import socket

import jax
import numpy as np
from jax.experimental import multihost_utils

from decent_jax.planner.plan import Plan
from decent_jax.train.config import ConfigError
from decent_jax.train.progress import announce

# Variables by which a launcher is recognised, with the number of processes where it says it.
_LAUNCHERS = {
    "SLURM": ("SLURM_STEP_ID", "SLURM_NTASKS"),
    "Open MPI": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    "Kubernetes": ("JOB_COMPLETION_INDEX", None),
}


def start(config) -> str:
    """Start jax as ``config.cluster`` and ``config.mesh`` say; returns a line for the log.

    Processes are joined when the config names a coordinator, or when SLURM (`srun`), Open MPI or
    Kubernetes started this process with others. Nothing is tried and swallowed: a launcher that is
    there but does not work is an error. A second call in a process changes nothing.

    Raises:
      ConfigError: simulated devices asked for after jax has started with others.
    """
    cluster = config.cluster
    if config.mesh.simulate:
        _simulate(config.mesh.simulate)
    launcher = detect_launcher()
    if jax.distributed.is_initialized():
        return f"process {jax.process_index()} of {jax.process_count()}"
    if not cluster.coordinator and launcher is None:
        return "one process (no coordinator in the config, no launcher detected)"
    # CPU devices of several processes talk over gloo; without a CPU cluster it has no effect.
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    if cluster.coordinator:
        waiting = f"waiting for {cluster.num_processes} processes at {cluster.coordinator}"
        with announce(waiting, quiet=cluster.process_id != 0):
            jax.distributed.initialize(
                cluster.coordinator,
                cluster.num_processes,
                cluster.process_id,
                cluster_detection_method="deactivate",
                initialization_timeout=cluster.timeout_s,
                heartbeat_timeout_seconds=cluster.heartbeat_s,
            )
        how = f"coordinator {cluster.coordinator}"
    else:
        jax.distributed.initialize(
            initialization_timeout=cluster.timeout_s,
            heartbeat_timeout_seconds=cluster.heartbeat_s,
        )
        how = launcher
    return f"process {jax.process_index()} of {jax.process_count()} ({how})"


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
    hosts = _hosts()
    seen = collections.Counter()
    names = []
    for device in devices:
        host = hosts[device.process_index]
        names.append(f"{host}/{seen[host]}")
        seen[host] += 1
    return names


def table(devices: list[jax.Device], block: int) -> str:
    """Which replicas live on which device of which host, one line a device."""
    hosts = _hosts()
    lines = ["replicas  process  host                  device"]
    for k, device in enumerate(devices):
        last = (k + 1) * block - 1
        replicas = f"{k * block}" if block == 1 else f"{k * block}-{last}"
        host = hosts[device.process_index]
        lines.append(f"{replicas:<8}  {device.process_index:<7}  {host:<20}  {device}")
    return "\n".join(lines)


def _hosts() -> list[str]:
    """The host name of every process; all processes must call it at the same point."""
    width = 64
    name = socket.gethostname().encode()[:width].ljust(width)
    names = [name]
    if jax.process_count() > 1:
        names = multihost_utils.process_allgather(np.frombuffer(name, np.uint8)).tobytes()
        names = [names[i : i + width] for i in range(0, len(names), width)]
    return [name.decode(errors="replace").strip() for name in names]


def any_process(flag: bool) -> bool:
    """Whether the flag is set on any process; all processes must call it at the same point."""
    if jax.process_count() == 1:
        return flag
    return bool(multihost_utils.process_allgather(np.array(flag)).any())
