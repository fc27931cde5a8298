"""The fields of a config about the processes of a run, and the check of them."""

from ml_collections import ConfigDict

from decent_jax.ground.errors import ConfigError
from decent_jax.ground.fields import Changeable
from decent_jax.ground.format import shown

FIELDS = {
    "cluster.coordinator": Changeable(
        "", '"host:port" of process 0; empty: detect SLURM, Open MPI, Kubernetes, TPUs'
    ),
    "cluster.num_processes": Changeable(0, "processes of the run", at_least=0),
    "cluster.process_id": Changeable(-1, "number of this process, from 0", at_least=-1),
    "cluster.plan": Changeable(
        "", "plan of the planner, a file: order of devices, schedule, mix_every"
    ),
    "cluster.timeout_s": Changeable(
        300, "seconds to wait for all processes at the start", at_least=1
    ),
    "cluster.heartbeat_s": Changeable(
        30, "seconds of silence after which a process counts as lost and all end", at_least=1
    ),
    "cluster.exchange_s": Changeable(
        600, "seconds after which an exchange between living processes fails", at_least=1
    ),
}


def check(config: ConfigDict) -> None:
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
            f"{cluster.process_id}",
            field="cluster",
            value=cluster.process_id,
        )
    if cluster.num_processes and config.num_replicas % cluster.num_processes:
        wanted = f"must divide num_replicas, {config.num_replicas}"
        raise ConfigError.about("cluster.num_processes", cluster.num_processes, wanted)
