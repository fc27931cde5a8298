"""Detects from the environment which launcher started this process, and with how many others."""

import os
import re

from decent_jax.ground.errors import ConfigError

# The variable that identifies a launcher, and variables with the number of processes, if any. In
# the interactive shell of salloc, which is a step of one process, SLURM_NTASKS is the number of
# processes that srun could start. Open MPI comes first because its processes in a SLURM job also
# see the variables of a step with one task per node.
LAUNCHERS = {
    "Open MPI": ("OMPI_COMM_WORLD_RANK", ("OMPI_COMM_WORLD_SIZE",)),
    "SLURM": ("SLURM_STEP_ID", ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")),
    "Kubernetes": ("JOB_COMPLETION_INDEX", ()),
}
# Variables with the number of processes, set by launchers that are not supported: torchrun, MPICH
# and Intel MPI, MVAPICH, jsrun, Flux, Horovod, Kubeflow, mpiexec, mpirun, and any launcher that
# sets jax's own variable.
UNREAD = str.split(
    "WORLD_SIZE PMI_SIZE MV2_COMM_WORLD_SIZE JSM_NAMESPACE_SIZE FLUX_JOB_SIZE HOROVOD_SIZE "
    "PET_NNODES MPI_LOCALNRANKS OMPI_COMM_WORLD_SIZE JAX_NUM_PROCESSES"
)
# Variables that show that a process is one of several, but not of how many.
UNCOUNTED = str.split(
    "JAX_COORDINATOR_ADDRESS MEGASCALE_COORDINATOR_ADDRESS JAX_PROCESS_ID SLURM_PROCID PMIX_RANK "
    "PMI_RANK ALPS_APP_PE PALS_RANKID JSM_NAMESPACE_RANK FLUX_TASK_RANK LSF_PM_TASKID"
)
VARIABLES = (*(own for own, _ in LAUNCHERS.values()), *UNREAD, *UNCOUNTED)
BY_HAND = "set cluster.coordinator, cluster.num_processes and cluster.process_id"


def detect_launcher() -> str | None:
    """The launcher that started this process together with others; None if there is none."""
    for name, (variable, sizes) in LAUNCHERS.items():
        if variable in os.environ and (not sizes or (size_of(name) or 1) > 1):
            return name
    return "Cloud TPU" if _on_several_tpu_hosts() else None


def size_of(launcher: str) -> int | None:
    """The number of processes that the launcher's variables give; None if none of them is set."""
    variables = LAUNCHERS[launcher][1]
    variable = next((name for name in variables if name in os.environ), None)
    return None if variable is None else number_in(variable, os.environ[variable])


def shows_own_devices(launcher: str | None) -> bool:
    """Whether a process sees only its own devices: it is alone on its host, or bound to them.

    Otherwise, jax gives the k-th process of a host the host's k-th device.
    """
    told = os.environ.get
    if launcher == "SLURM":
        nodes = told("SLURM_STEP_NUM_NODES", "")
        return bool(told("SLURM_GPUS_PER_TASK")) or nodes == told("SLURM_STEP_NUM_TASKS")
    return launcher == "Open MPI" and told("OMPI_COMM_WORLD_LOCAL_SIZE") == "1"


def check_unread(count: int) -> None:
    """Raise ConfigError if an unsupported launcher started several processes.

    Without this check, each of them would train alone.

    Args:
      count: number of processes that find each other through the supported variables.
    """
    for variable in UNREAD:
        told = os.environ.get(variable, "").strip()
        if told.isdecimal() and int(told) > 1 and int(told) != count:
            others = "this one is alone" if count == 1 else f"{count} find each other"
            why = f"says how many processes were started, but {others}: {BY_HAND}, or unset it"
            raise ConfigError.about(variable, told, why)
    counted = os.environ.keys() & set(VARIABLES).difference(UNCOUNTED)
    if count == 1 and not counted:
        for variable in UNCOUNTED:
            of_batch_script = variable == "SLURM_PROCID" and os.environ.get(variable) == "0"
            if (value := os.environ.get(variable)) and not of_batch_script:
                why = f"says others were started, but this one is alone: {BY_HAND}, or unset it"
                raise ConfigError.about(variable, value, why)


def _on_several_tpu_hosts() -> bool:
    """Whether this host is one of several in a TPU pod, by its variables or the VM's metadata."""
    from jax._src import cloud_tpu_init, clusters

    if not cloud_tpu_init.running_in_cloud_tpu_vm:
        return False
    here = (env for env in clusters.ClusterEnv._cluster_types if "tpu" in env.name)
    launcher = next((env for env in here if env.is_env_present()), None)
    return launcher is not None and launcher.get_process_count() > 1


def first_host(listed: str) -> str:
    """The first host in a list in SLURM's notation.

    >>> [first_host(x) for x in ("a,b", "rack[0-1]node[2-3]", "node[01-02,7]-ib", "c[9]")]
    ['a', 'rack0node2', 'node01-ib', 'c9']
    """
    first = re.split(r",(?![^\[]*\])", listed)[0]
    return re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", first)


def number_in(variable: str, text: str) -> int:
    """The number in ``text``, the value of an environment variable or one item of a list in it."""
    try:
        return int(text)
    except ValueError:
        raise ConfigError.about(variable, text, "must hold whole numbers") from None
