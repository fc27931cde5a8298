"""The cost of communication on a network: transfers, permutes, group means, all-reduce.

Replica i is on device i of the `Network`; ``network.take(order)`` gives another placement. A
transfer takes ``latency + bytes / rate``. Concurrent transfers share the network card (NIC) of
every node they leave or enter, by max-min fairness, and none is faster than its own link. Each
transfer keeps its initial rate. If all transfers carry the same number of bytes, as in every
collective here, the slowest share one bottleneck and end together, so their time is exact. Faster
transfers could end a little earlier than modelled. Not modelled: a PCIe bus shared inside a node,
switches between nodes, losses and congestion.

A *phase* is one collective as each replica sees it: the replica waits until all its partners have
begun (a transfer needs both ends), and is done ``duration_s`` later. A round is a sequence of
phases, because XLA does not overlap collectives that share devices.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike
from scipy.sparse import csr_array
from scipy.sparse.csgraph import connected_components

from decent_jax.planner.network import Network
from decent_jax.topology import Round, Schedule

# How to execute a round that averages in groups and then exchanges between them.
Execution = Literal["hierarchical", "plain", "all_reduce"]
AllReduce = Literal["auto", "ring", "tree", "hierarchical"]
Groups = Sequence[np.ndarray]  # the devices of each group, (g,); together all devices


@dataclasses.dataclass(frozen=True, eq=False)
class Phase:
    """One collective over n replicas.

    duration_s: (n,) float64; seconds until a replica is done, once all its partners have begun.
    label: (n,) int; replicas with the same label wait for each other. None with ``sources``.
    sources: (n,) int; replica i receives from ``sources[i]`` (-1: none), and both wait for each
      other. None with ``label``.
    """

    duration_s: np.ndarray
    label: np.ndarray | None = None
    sources: np.ndarray | None = None

    def end_s(self, start_s: np.ndarray) -> np.ndarray:
        """When each replica finishes, (..., n) seconds, if it starts at ``start_s``, (..., n)."""
        if self.label is not None:
            order, first = self._groups
            begun = np.maximum.reduceat(start_s[..., order], first, axis=-1)[..., self.label]
        else:
            receivers, senders = self._pairs
            begun = start_s.copy()
            begun[..., receivers] = np.maximum(begun[..., receivers], start_s[..., senders])
            begun[..., senders] = np.maximum(begun[..., senders], start_s[..., receivers])
        return begun + self.duration_s

    @functools.cached_property
    def _groups(self) -> tuple[np.ndarray, np.ndarray]:
        """The replicas sorted by label, and the first index of each label."""
        label = np.asarray(self.label)
        order = np.argsort(label, kind="stable")
        return order, np.flatnonzero(np.diff(label[order], prepend=-1))

    @functools.cached_property
    def _pairs(self) -> tuple[np.ndarray, np.ndarray]:
        """Receivers and their senders."""
        sources = np.asarray(self.sources)
        receivers = np.flatnonzero(sources >= 0)
        return receivers, sources[receivers]


# --- transfers ----------------------------------------------------------------------------------


def rates(network: Network, sources: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """The max-min fair rates, (k,) bytes per second, of concurrent transfers.

    Args:
      sources, targets: (k,) devices. The limits are each pair's own bandwidth and, for pairs in
        different nodes, the NICs of the sender's node (out) and of the receiver's (in).
    """
    sources, targets = np.asarray(sources, np.int64), np.asarray(targets, np.int64)
    limit = network.bandwidth_bytes_per_s[sources, targets].copy()
    out, into = network.node[sources], network.node[targets]
    leaves = out != into
    # Every NIC is two resources, one per direction; a transfer inside a node uses neither.
    shared = np.stack([out, network.num_nodes + into])[:, leaves]
    limit[leaves] = _max_min(
        limit[leaves], shared, np.concatenate([network.nic_bytes_per_s] * 2).astype(float)
    )
    return limit


def _max_min(own_limit: np.ndarray, shared: np.ndarray, capacity: np.ndarray) -> np.ndarray:
    """Max-min fair rates; transfer k uses the resources ``shared[:, k]``.

    Each pass offers every transfer the least of its own limit and equal shares of the remaining
    capacity of its resources. It then fixes the rates of transfers whose offer is the least on each
    of their resources; the slowest transfer is always among them.
    """
    rate = np.zeros(len(own_limit))
    open_ = np.ones(len(own_limit), bool)
    capacity = capacity.copy()
    while open_.any():
        users = np.bincount(shared[:, open_].ravel(), minlength=len(capacity))
        share = np.where(users > 0, capacity / np.maximum(users, 1), np.inf)
        offer = np.minimum(own_limit, share[shared].min(axis=0))
        # The least offer on a resource is final, because no other transfer takes less of it.
        least = np.full(len(capacity), np.inf)
        for resource in shared:
            np.minimum.at(least, resource[open_], offer[open_])
        settled = open_ & (offer <= least[shared].min(axis=0) * (1 + 1e-12))
        rate[settled] = offer[settled]
        for resource in shared:
            np.subtract.at(capacity, resource[settled], rate[settled])
        capacity = np.maximum(capacity, 0.0)
        open_ &= ~settled
    return rate


def link_s(network: Network, num_bytes: float) -> np.ndarray:
    """(n, n) seconds of a transfer while every device of both nodes sends and receives one."""
    per_node = np.bincount(network.node, minlength=network.num_nodes)
    share = (network.nic_bytes_per_s / per_node)[network.node]
    leaves = network.node[:, None] != network.node
    shared = np.minimum(network.bandwidth_bytes_per_s, np.minimum(share[:, None], share))
    return network.latency_s + num_bytes / np.where(leaves, shared, network.bandwidth_bytes_per_s)


def permute_phase(network: Network, sources: ArrayLike, num_bytes: float) -> Phase:
    """The phase in which replica i receives ``num_bytes`` from ``sources[i]`` (-1: nothing).

    A replica is done once it has received its message and the message that it sent has arrived.
    """
    wanted = np.asarray(sources, np.int64)
    receivers = np.flatnonzero(wanted >= 0)
    senders = wanted[receivers]
    seconds = network.latency_s[senders, receivers] + num_bytes / rates(network, senders, receivers)
    duration = np.zeros(len(wanted))
    duration[receivers] = seconds
    np.maximum.at(duration, senders, seconds)
    return Phase(duration, sources=wanted)


# --- means of groups ----------------------------------------------------------------------------


def ring_phase(network: Network, groups: Groups, num_bytes: float, *, laps: int = 2) -> Phase:
    """A ring all-reduce (two laps) in every group at the same time (Patarasuk & Yuan 2009).

    One lap is a reduce-scatter or an all-gather. A group of g sends chunks of ``num_bytes / g``
    around the ring, in the order of its members, ``laps (g - 1)`` times. A member passes a chunk on
    when it has arrived and the link is free. The bandwidth of the slowest link therefore sets the
    pace, and latencies add up.
    """
    duration = np.zeros(network.num_devices)
    rings = [group for group in groups if len(group) > 1]
    if rings:
        senders = np.concatenate(rings)
        receivers = np.concatenate([np.roll(group, -1) for group in rings])
        rate = rates(network, senders, receivers)
        latency = network.latency_s[senders, receivers]
        first = 0
        for group in rings:
            links = slice(first, first + len(group))
            chunk_s = num_bytes / len(group) / rate[links]
            duration[group] = _ring_s(chunk_s, latency[links], laps * (len(group) - 1))
            first += len(group)
    return Phase(duration, label=_labels(groups, network.num_devices))


def _ring_s(chunk_s: np.ndarray, latency_s: np.ndarray, steps: int) -> float:
    """Seconds until all members have the last chunk; link h connects members h and h + 1."""
    if np.ptp(chunk_s) == 0 and np.ptp(latency_s) == 0:
        return float(steps * (chunk_s[0] + latency_s[0]))
    free = np.zeros(len(chunk_s))  # when link h has sent its last chunk
    have = np.zeros(len(chunk_s))  # when member h has the chunk that it sends next
    for _ in range(steps):
        free = np.maximum(free, have) + chunk_s
        have = np.roll(free + latency_s, 1)
    return float(have.max())


def tree_phase(network: Network, groups: Groups, num_bytes: float) -> Phase:
    """An all-reduce in every group at the same time, on two binary trees, each for half the data.

    The trees are NCCL's (Sanders, Speck & Träff 2009). They connect nodes, and the devices of a
    node form a chain. A node that has children in one tree is a leaf of the other. Reduction and
    broadcast are pipelined in small chunks, so every edge carries half the data in each direction
    all the time, and latencies count twice along the longest path to a root.
    """
    duration = np.zeros(network.num_devices)
    edges, depth_s = [], np.zeros(len(groups))
    for k, group in enumerate(groups):
        for tree in _double_tree(network, group):
            edges.append(np.column_stack([tree, np.full(len(tree), k)]))
            depth_s[k] = max(depth_s[k], _longest_way_s(network, tree))
    child, parent, owner = np.concatenate(edges).T
    rate = rates(network, np.concatenate([child, parent]), np.concatenate([parent, child]))
    slowest_s = np.zeros(len(groups))
    np.maximum.at(slowest_s, np.tile(owner, 2), num_bytes / 2 / rate)
    for k, group in enumerate(groups):
        duration[group] = slowest_s[k] + 2 * depth_s[k]
    return Phase(duration, label=_labels(groups, network.num_devices))


def _double_tree(network: Network, group: np.ndarray) -> list[np.ndarray]:
    """The (child, parent) edges of both trees, each (g - 1, 2)."""
    machines = [group[network.node[group] == node] for node in dict.fromkeys(network.node[group])]
    chains = [
        np.stack([members[1:], members[:-1]], axis=1) for members in machines if len(members) > 1
    ]
    leaders = np.array([members[0] for members in machines])
    n = len(leaders)
    up = np.array([_tree_parent(rank, n) for rank in range(1, n)], np.int64)
    ranks = np.arange(1, n)
    trees = []
    # The second tree is the first with its ranks mirrored, or shifted where n is odd.
    for renumber in (np.arange(n), np.arange(n)[::-1] if n % 2 == 0 else (np.arange(n) + 1) % n):
        between = np.stack([leaders[renumber[ranks]], leaders[renumber[up]]], axis=1)
        trees.append(np.concatenate([*chains, between]))
    return trees


def _tree_parent(rank: int, n: int) -> int:
    """The parent of a rank other than 0, the root; odd ranks are leaves."""
    bit = rank & -rank
    parent = (rank ^ bit) | (bit << 1)
    return parent if parent < n else rank ^ bit


def _longest_way_s(network: Network, edges: np.ndarray) -> float:
    """The sum of latencies, in seconds, from the leaf that is farthest from the root."""
    up = dict(edges.tolist())
    longest = 0.0
    for leaf in up:
        way, at = 0.0, leaf
        while at in up:
            way += float(network.latency_s[at, up[at]])
            at = up[at]
        longest = max(longest, way)
    return longest


def all_reduce_phases(
    network: Network,
    num_bytes: float,
    algorithm: AllReduce = "auto",
    groups: Groups | None = None,
) -> list[Phase]:
    """The phases of a mean of ``num_bytes`` over all devices, or in every group at the same time.

    - ``ring``, ``tree``: see `ring_phase`, `tree_phase`;
    - ``auto``: for each group the faster of these two, as NCCL's tuner should choose;
    - ``hierarchical``: reduce-scatter inside each node, ring all-reduce of the shards across
      nodes, all-gather inside. Collective libraries do not do this by themselves.

    Raises:
      ValueError: an unknown name, or ``hierarchical`` for groups that do not have equally many
        members, at least two, in each of at least two nodes.
    """
    groups = [np.arange(network.num_devices)] if groups is None else groups
    if algorithm == "hierarchical":
        return _hierarchical_all_reduce(network, groups, num_bytes)
    makers = {"ring": [ring_phase], "tree": [tree_phase], "auto": [ring_phase, tree_phase]}
    if algorithm not in makers:
        raise ValueError(f"all-reduce must be auto, ring, tree or hierarchical, got {algorithm!r}")
    phases = [make(network, groups, num_bytes) for make in makers[algorithm]]
    fastest = np.min([phase.duration_s for phase in phases], axis=0)
    return [Phase(fastest, label=phases[0].label)]


def _hierarchical_all_reduce(network: Network, groups: Groups, num_bytes: float) -> list[Phase]:
    inside: list[np.ndarray] = []
    across: list[np.ndarray] = []
    for group in groups:
        nodes = network.node[group]
        machines = [group[nodes == node] for node in dict.fromkeys(nodes.tolist())]
        size = len(machines[0])
        if len(machines) < 2 or size < 2 or any(len(part) != size for part in machines):
            raise ValueError(
                "a hierarchical all-reduce needs equally many members, at least two, in each of "
                "at least two nodes; use ring, tree or auto"
            )
        inside += machines
        across += list(np.stack(machines, axis=1))
    shard = num_bytes / len(inside[0])
    return [
        ring_phase(network, inside, num_bytes, laps=1),
        ring_phase(network, across, shard),
        ring_phase(network, inside, num_bytes, laps=1),
    ]


def all_reduce_s(network: Network, num_bytes: float, algorithm: AllReduce = "auto") -> float:
    """Seconds for the mean of ``num_bytes`` over all devices; see `all_reduce_phases`."""
    return total_s(all_reduce_phases(network, num_bytes, algorithm))


# --- rounds -------------------------------------------------------------------------------------


def round_phases(
    network: Network,
    rnd: Round,
    num_bytes: float,
    execution: Execution = "hierarchical",
    *,
    compression: float = 1.0,
) -> list[Phase]:
    """The collectives of one round, in the order in which they run.

    A permutation is a permute of the whole model. A mean of groups is an all-reduce; if messages
    are coded (``compression`` below 1), it is permutes of chunks to owners and an all-gather
    (`decent_jax.gossip.groups`). Groups that send to each other (alternating_exp_ring) send sums,
    which are never coded; ``execution`` is one of:

    - ``hierarchical``: reduce-scatter in the group, permute of the shards of 1/g, all-gather;
    - ``plain``: all-reduce in the group, then a permute of whole models;
    - ``all_reduce``: partners form one group, which all-reduces (Decent-DP does this for every
      round, pairs included). The round must be a mean over disjoint groups.

    Args:
      num_bytes: size of a model in float32.
      compression: size of a message, as a fraction of ``num_bytes``.
    """
    n, g = len(rnd.self_weights), rnd.group_size
    if n != network.num_devices:
        raise ValueError(
            f"the schedule is for {n} replicas, but the network has {network.num_devices} devices"
        )
    if execution == "all_reduce":
        return all_reduce_phases(network, num_bytes, "auto", mean_groups(rnd))
    if execution not in ("hierarchical", "plain"):
        raise ValueError(
            f"execution of a round must be hierarchical, plain or all_reduce, got {execution!r}"
        )

    def permutes(size: float) -> list[Phase]:
        return [permute_phase(network, send.sources, size) for send in rnd.sends]

    if g == 1:
        return permutes(compression * num_bytes)
    members = np.arange(n).reshape(-1, g)
    groups = list(members)
    if (rnd.sends and execution == "plain") or (not rnd.sends and compression == 1):
        return all_reduce_phases(network, num_bytes, "auto", groups) + permutes(num_bytes)
    lap = ring_phase(network, groups, compression * num_bytes, laps=1)
    if rnd.sends:
        return [lap, *permutes(num_bytes / g), lap]
    senders = [np.roll(members, shift, axis=1).ravel() for shift in range(1, g)]
    return [*(permute_phase(network, order, compression * num_bytes / g) for order in senders), lap]


def mean_groups(rnd: Round) -> list[np.ndarray]:
    """The disjoint groups that this round averages.

    Raises:
      ValueError: the round is not a mean over disjoint groups.
    """
    count, label = connected_components(csr_array(rnd.matrix > 0), directed=False)
    size = np.bincount(label)
    mean = (label[:, None] == label) / size[label][:, None]
    if np.abs(mean - rnd.matrix).max() > 1e-9:
        raise ValueError(
            "only a round that is a mean over disjoint groups can be executed by all-reduce; use "
            "hierarchical or plain"
        )
    return [np.flatnonzero(label == k) for k in range(count)]


def round_s(
    network: Network,
    schedule: Schedule,
    r: int,
    num_bytes: float,
    execution: Execution = "hierarchical",
) -> float:
    """Seconds of round ``r`` of a schedule from a common start until all replicas have mixed.

    Args:
      num_bytes: bytes of a model as sent (parameters x bytes per parameter in their codec).
    """
    return total_s(round_phases(network, schedule.rounds[r], num_bytes, execution))


def total_s(phases: Sequence[Phase]) -> float:
    """Seconds from a common start until all replicas have finished all phases."""
    if not phases:
        return 0.0
    end = np.zeros(len(phases[0].duration_s))
    for phase in phases:
        end = phase.end_s(end)
    return float(end.max())


def _labels(groups: Groups, n: int) -> np.ndarray:
    """(n,) int: the group of each replica."""
    label = np.zeros(n, np.int64)
    for k, group in enumerate(groups):
        label[group] = k
    return label
