"""The settings of a run: one frozen dataclass for each section of a config.

Other packages declare their sections next to their code (`decent_jax.checkpoints`,
`decent_jax.monitor`, `decent_jax.cluster.start`, a task's ``Model`` and ``Data``, peers and
pipelines). `decent_jax.train.config` adds the sections of tasks, methods and trainers.
"""

from dataclasses import dataclass
from importlib.metadata import entry_points

from decent_jax.checkpoints import Checkpoint, Recovery
from decent_jax.cluster.start import Cluster
from decent_jax.gossip import codecs
from decent_jax.ground.fields import changeable, section, setting, table, value_of
from decent_jax.ground.json_files import Json
from decent_jax.monitor.metrics_file import Log
from decent_jax.monitor.step_trace import Profile
from decent_jax.optim import METHODS
from decent_jax.tasks import TaskConfig

# Each entry point of this group in the package's metadata is a trainer: a package or module with
# SECTIONS, check, run and dry_run; `decent_jax.train.synchronous` needs no SECTIONS.
TRAINERS = {point.name: point for point in entry_points(group="decent_jax.trainers")}
SYNCHRONOUS = "synchronous"
_GOSSIP = METHODS["decentralized_sgd"]  # its hyperparameters have no section


@dataclass(frozen=True)
class LrSchedule:
    """How the learning rate changes over the steps."""

    name: str = setting(
        "cosine",
        "shape of the decay",
        choices=("cosine", "linear", "inverse_sqrt", "step", "constant"),
    )
    warmup: int | str = setting("10%", "length of the linear warm-up", duration=True)
    end_factor: float = setting(
        0.1, "cosine and linear end at this multiple of the peak", at_least=0
    )
    drops: str = setting("30%, 60%, 90%", "with name step: when the learning rate drops to a tenth")


@dataclass(frozen=True)
class Optimizer:
    """The optimizer, the same on every replica."""

    name: str = setting(
        "",
        "adam, accum_adam, sgd or muon; empty: the algorithm's; or any optax optimizer, or your "
        "own, by its dotted name with arguments: optax.contrib.muon(beta=0.9)",
    )
    accum_steps: int = setting(
        4, "steps whose mean gradient enters the moments of accum_adam", at_least=1
    )
    momentum: float = setting(0.9, "momentum of sgd and muon", at_least=0, below=1)
    b1: float = setting(0.9, "decay rate of Adam's first moment", at_least=0, below=1)
    b2: float = setting(0.999, "decay rate of Adam's second moment", at_least=0, below=1)
    eps: float = setting(1e-8, "added to the root of Adam's second moment", at_least=0)
    weight_decay: float = setting(0.0, "per step, multiplied by the learning rate", at_least=0)
    decoupled: bool = setting(True, "weight decay as in AdamW; False: in the gradient (L2)")
    clip_norm: float = setting(0.0, "bound on a replica's gradient norm; 0: none", at_least=0)


@dataclass(frozen=True)
class Mesh:
    """How replicas are placed on devices."""

    devices: int = changeable(
        0, "devices that hold replicas; 0: as many as divide num_replicas", at_least=0
    )
    fsdp: int = changeable(1, "devices over which a replica is sharded", at_least=1)
    sequential_replicas: bool = changeable(
        False, "compute a device's replicas sequentially, with less memory"
    )


@dataclass(frozen=True)
class Eval:
    """Evaluation of the consensus model."""

    every: int | str = changeable(
        500, "steps between evaluations; 0: only at the end", duration=True
    )
    batches: int = changeable(0, "validation batches per evaluation; 0: all", at_least=0)
    batch_size: int = changeable(0, "examples per batch; 0: as in training", at_least=0)
    replicas: bool = changeable(
        False, "also evaluate each replica: the worst and the mean, such as eval/loss_worst"
    )


@dataclass(frozen=True)
class Config(TaskConfig):
    """All settings of a run that do not depend on its task, its method or its trainer.

    `decent_jax.train.config.parse` returns an instance of a subclass that adds these: the task's
    sections, and one section for each trainer and each method with hyperparameters of its own.
    """

    trainer: str = setting(
        SYNCHRONOUS,
        "synchronous: one program; peers: no common step; pipelines: replicas cut into stages",
    )
    algorithm: str = setting("accum_adam", "training and communication; see docs/algorithms.md")
    schedule: str = changeable(
        "one_peer_exp",
        "communication graph, see docs/topologies.md; auto: chosen for the hosts; all_reduce "
        "ignores it",
    )
    combine: str = setting(
        "",
        "awc: mix the old parameters (adapt with combine); atc: the new ones (adapt then combine)",
        choices=("awc", "atc", ""),
    )
    mix_every: int = setting(1, "steps per round", at_least=1)
    codec: str = setting("float32", "message format", choices=(*codecs.NAMED, *codecs.LATTICES))
    replicas_per_node: int = changeable(
        1, "replicas per node, for schedules that use nodes", at_least=1
    )
    gamma_lr_exponent: float = setting(
        0.0, "multiplies gamma by (learning rate / peak) to this power", at_least=0
    )
    same_init: bool = setting(
        True, "all replicas start equal; False: each draws its own parameters"
    )
    steps: int = changeable(1000, "updates of each replica", at_least=0)
    epochs: float = changeable(0.0, "passes over the data; above 0, it replaces steps", at_least=0)
    learning_rate: float = setting(1e-3, "peak learning rate", at_least=0)
    gamma: float = setting(_GOSSIP.numbers["gamma"], _GOSSIP.help["gamma"])
    mix_rounds: int = setting(1, _GOSSIP.help["mix_rounds"])
    lr_schedule: LrSchedule = section(LrSchedule)
    optimizer: Optimizer = section(Optimizer)
    mesh: Mesh = section(Mesh)
    checkpoint: Checkpoint = section(Checkpoint)
    recovery: Recovery = section(Recovery)
    eval: Eval = section(Eval)
    log: Log = section(Log)
    profile: Profile = section(Profile)
    cluster: Cluster = section(Cluster)

    @property
    def by_name(self) -> Json:
        """The value of every field by dotted name."""
        return {name: value_of(self, name) for name in table(type(self))}
