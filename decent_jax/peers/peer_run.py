"""The parts of a run of peers: the run directory, the run of one replica in each peer, the data."""

import contextlib
import copy
import itertools
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import grain
import jax
import jax.numpy as jnp

from decent_jax.actors.ray_cluster import leave_launcher
from decent_jax.data import loader
from decent_jax.ground import fields
from decent_jax.ground.errors import ConfigError, DataError
from decent_jax.ground.json_files import Json, is_real, read_json
from decent_jax.ground.pytree import PyTree
from decent_jax.optim import METHODS
from decent_jax.optim.method_wrapper import no_rounds
from decent_jax.peers import FORMATS, Config
from decent_jax.peers.events import fits
from decent_jax.train import algorithm
from decent_jax.train import config as config_lib
from decent_jax.train.experiment import Experiment, open_experiment
from decent_jax.train.same_data import check_same_as_train_py
from decent_jax.train.workdir import Workdir

FOLDER = "peers"  # peers/RANK/ is the run of a peer
MANIFEST = "peers.json"  # progress, data streams, and which peers were alive
COUNT, MOST = "count.json", 2**16  # the number of peers that `resize` asks for; the maximum
_ANOTHER_DRAW = 1_000_003  # offset between the seeds of streams 0 to n - 1, n to 2 n - 1, ...


class Place(NamedTuple):
    """The identity of a peer."""

    config: Config  # of the whole run
    workdir: str  # of the whole run
    rank: int  # also the number of its data stream
    generation: int  # counts the peers that have had this rank
    start: int | None  # first step of a peer that joins; None: resume from its own checkpoint
    num_streams: int  # data streams that together read every record once per epoch
    all_steps: int = 0  # steps of all ranks together, when it starts
    data: dict[str, str] | None = None  # facts about the data of `train.py`; None: not compared

    @property
    def name(self) -> str:
        """The name of the peer, "rank.generation"."""
        return f"{self.rank}.{self.generation}"

    @property
    def folder(self) -> Path:
        """The folder of the peer's own run."""
        return Path(self.workdir) / FOLDER / str(self.rank)


class CommonProgress:
    """Common progress, as far as this peer knows: the steps of all ranks together.

    Args:
      peers_per_step: peer steps per step of the run, ``num_replicas``.
      steps: steps of the run.
    """

    def __init__(self, peers_per_step: int, steps: int):
        self._peers_per_step, self._steps = peers_per_step, steps
        self._others = 0  # last known steps of all other ranks
        self.own = 0  # steps of this rank

    def update(self, all_steps: int, own_then: int) -> None:
        """Take the membership's count of all steps, and the steps of this rank in that count."""
        self._others = all_steps - own_then

    def progress(self) -> int:
        """Common progress in steps of the run."""
        return (self._others + self.own) // self._peers_per_step

    def over(self) -> bool:
        """Whether all peers together have made all steps of the run."""
        return self.progress() >= self._steps


def check(config: Config) -> None:
    """Make all checks that are possible before anything starts.

    Raises:
      ConfigError: the config cannot be used; the message names the field and its value.
    """
    allowed = {
        "algorithm": [name for name, method in METHODS.items() if method.pairwise],
        "combine": ["", "awc"],
        "codec": FORMATS,
        "outer.fragments": [1],
        "outer.delay": [0],
        "data.partition": ["iid"],
        "cluster.coordinator": [""],
        "cluster.plan": [""],
        "gamma_lr_exponent": [0],
    }
    fields.check_allowed(config, allowed)
    silent_s, start_s = config.peers.silent_s, config.peers.start_s
    if silent_s > start_s:
        why = f"must be at least peers.silent_s ({silent_s:g} s)"
        raise ConfigError.about("peers.start_s", start_s, why)
    # Peers use no schedule, but methods require one.
    config_lib.check(config_lib.changed(config, schedule="random_matching"))


def count_of(config: Config) -> int:
    """The number of peers that should train."""
    return config.peers.count or config.num_replicas


def forget(folder: Path, first: int) -> None:
    """Remove the checkpoints of a run directory from step ``first`` on; they will be rewritten."""
    for path in (folder / "checkpoints").glob("*"):
        number = path.name.partition(".")[0]  # of a step, or of a draft
        if number.isdecimal() and int(number) >= first:
            shutil.rmtree(path, ignore_errors=True)


@contextlib.contextmanager
def open_run(
    config: Config, workdir: str | Path, rank: int = 0, checked: bool = False
) -> Iterator[tuple[Experiment, Workdir]]:
    """Open the run of one replica with the steps, durations and learning rate of the whole run.

    The run's optimizer makes only local steps and takes its learning rate from the counts that
    `StateChanges.at_progress` sets. `StateChanges.average` replaces the rounds of a method. The
    run's random numbers depend on the rank.

    Raises:
      ConfigError: see `open_experiment`; or the task has a state that cannot be averaged.
    """
    leave_launcher()
    alone = {"num_replicas": 1, "schedule": "one_peer_exp", "mesh.devices": 0}
    alone = config_lib.changed(config, **alone)
    with open_experiment(alone, workdir, config.num_replicas, checked) as (experiment, work):
        task = experiment.task
        _, model_state = jax.eval_shape(task.init, jax.random.key(0))
        leaves = jax.tree.leaves(model_state)
        averaged = task.mixes_state and all(jnp.issubdtype(x.dtype, jnp.floating) for x in leaves)
        if leaves and not averaged and not getattr(task, "recompute_batches", 0):
            raise ConfigError(
                f"trainer: task {config.task} has a model state that cannot be averaged between "
                "peers; set trainer to synchronous"
            )
        own = config_lib.changed(alone, combine="atc", mix_every=1)
        tx = algorithm.transformation(
            own,
            experiment.schedule,
            experiment.rate,
            task.decay_mask,
            experiment.placement.axis_name,
        )
        yield experiment._replace(config=own, tx=no_rounds(tx, rank)), work


@contextlib.contextmanager
def open_peer(place: Place) -> Iterator[tuple[Experiment, Workdir]]:
    """Open the run of one peer: its data stream, its share of the batch, its folder.

    Raises:
      ConfigError: see `open_run`; or `train.py` reads other data.
    """
    config = place.config
    with open_run(config, place.folder, place.rank, checked=True) as (experiment, work):
        if place.data is not None:
            check_same_as_train_py(config, experiment.task, place.data)
        yield of_peer(experiment, config, place.rank, place.num_streams), work


def of_peer(experiment: Experiment, config: Config, rank: int, num_streams: int) -> Experiment:
    """The run of one peer, derived from the run of one replica."""
    size, task = config.batch_size // config.num_replicas, copy.copy(experiment.task)
    task.train_source = Stream(task.train_source, rank, num_streams, size)
    own = config_lib.changed(experiment.config, batch_size=size)
    # An upper bound: this peer might have to make the steps of all peers.
    steps = experiment.steps * config.num_replicas
    return experiment._replace(config=own, task=task, steps=steps)


class Stream:
    """A source of training data with the batches of one peer, addressed by step.

    Streams 0 to n - 1 are the replicas' streams in a synchronous run: together they read every
    record once per epoch. Stream ``k >= n`` is stream ``k % n`` in another random order.
    """

    def __init__(self, source: Sequence[PyTree], stream: int, num_streams: int, batch_size: int):
        self._source, self._size = source, batch_size
        self._draw, self._stream = divmod(stream, num_streams)
        self._num_streams = num_streams

    def __len__(self) -> int:
        return len(self._source)

    def __getitem__(self, index: int) -> PyTree:
        return self._source[index]

    def __getattr__(self, name: str) -> object:
        if name in ("augment", "of_epoch"):  # the blocks below hold augmented records
            raise AttributeError(name)
        if "_source" not in self.__dict__:  # while it is copied or unpickled
            raise AttributeError(name)
        return getattr(self._source, name)

    def train_blocks(self, num_replicas: int, batch_size: int, seed: int) -> grain.MapDataset:
        """Item t: the stream's block of step t; see `decent_jax.data.loader`."""
        del num_replicas, batch_size  # of the peer's own run
        seed += self._draw * _ANOTHER_DRAW
        n = self._num_streams
        rows = loader.train_rows(self._source, seed=seed, num_replicas=n, batch_size=self._size * n)
        return grain.MapDataset.source(rows)[self._stream :: n]


def free_ranks(taken: list[int], count: int) -> list[int]:
    """The ``count`` lowest ranks that are not ``taken``."""
    free = (rank for rank in itertools.count() if rank not in taken)
    return list(itertools.islice(free, max(count, 0)))


def read_manifest(workdir: Path, config: Config) -> Json:
    """The manifest from earlier sessions; {} if there is none.

    Raises:
      ConfigError: the manifest is damaged, or its peers have another batch size.
    """
    try:
        manifest = read_json(workdir / MANIFEST, "is damaged; take another --workdir")
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except DataError as error:
        raise ConfigError(str(error)) from None
    if not _is_manifest(manifest):
        raise ConfigError(f"{workdir / MANIFEST} is damaged; take another --workdir")
    size = config.batch_size // config.num_replicas
    if manifest["batch"] != size:
        raise ConfigError(
            f"{workdir} holds a run in which a peer's batch is {manifest['batch']} examples, and "
            f"batch_size / num_replicas is {size}; to change the number of peers, set peers.count"
        )
    return manifest


def _is_manifest(value: Any) -> bool:
    """Whether ``value`` has the entries of a manifest, with plausible values."""
    return (
        fits(value, {"batch": int, "streams": int, "seconds": float, "peers": {}})
        and min(value["batch"], value["streams"]) > 0
        and (value.get("best") is None or is_real(value["best"]))
        and fits(value.get("data", {}), {})
        and all(
            rank.isdecimal() and len(rank) < 10 and fits(peer, {"steps": int, "alive": bool})
            for rank, peer in value["peers"].items()
        )
    )


def resumed(workdir: Path, manifest: Json) -> dict[int, int]:
    """{rank: step of its newest checkpoint} for the peers that resume.

    These are the peers that were alive at the end of the last session. If none of them has a
    checkpoint, these are the peers that died or left.
    """
    entries = manifest.get("peers", {})
    saved = {rank: saved_steps(workdir / FOLDER / rank) for rank in entries}
    ranks = [rank for rank in entries if saved[rank]]
    alive = [rank for rank in ranks if entries[rank]["alive"]]
    return {int(rank): max(saved[rank]) for rank in alive or ranks}


def known_steps(workdir: Path, manifest: Json) -> dict[int, int]:
    """{rank: steps}; for a rank that resumes, the step of its newest checkpoint."""
    known = resumed(workdir, manifest)
    if not known:  # killed before any peer had saved: all peers start from scratch
        return {}
    entries = manifest.get("peers", {})
    return {int(rank): entry["steps"] for rank, entry in entries.items()} | known


def saved_steps(folder: Path) -> list[int]:
    """The steps of the checkpoints in a peer's folder."""
    return [int(p.name) for p in (folder / "checkpoints").glob("*") if p.name.isdecimal()]
