"""The fields of a config about peers, see docs/peers.md."""

from decent_jax.ground.fields import Changeable, Field

FIELDS = {
    "peers.use": Field(
        False, "True: peers that meet in random pairs (Ray) instead of one synchronous program"
    ),
    "peers.address": Changeable("", '"auto" or "host:port" of a Ray cluster; empty: this machine'),
    "peers.count": Changeable(
        0,
        "peers that train; 0: num_replicas, which fixes a peer's batch",
        at_least=0,
        at_most=2**16,
    ),
    "peers.geometric": Field(
        False, "steps between two questions: True: geometric with mean mix_every; False: mix_every"
    ),
    "peers.neighbours": Changeable(
        "all",
        'who meets whom: all; "regular(d)", a random overlay of degree d; or weighted, near peers '
        "more often",
    ),
    "peers.wire": Field(
        "float32",
        "format of copies",
        choices=("float32", "bfloat16", "int8", "lattice8", "lattice16"),
    ),
    "peers.max_lag": Changeable(
        100,
        "steps of common progress after which a peer that returns joins as a new one",
        at_least=1,
    ),
    "peers.restarts": Changeable(
        3, "how often a peer that died is replaced by a new one", at_least=0
    ),
    "peers.cpus": Changeable(0.0, "cores that Ray reserves for a peer; 0: none", at_least=0),
    "peers.gpus": Changeable(0.0, "GPUs that Ray gives to a peer", at_least=0),
    "peers.beat_s": Changeable(0.2, "seconds between two reports of a peer", above=0),
    "peers.meet_s": Changeable(10.0, "seconds a meeting may take before it is given up", above=0),
    "peers.silent_s": Changeable(
        5.0, "seconds without a report after which nobody meets a peer", above=0
    ),
    "peers.join_s": Changeable(
        60.0, "seconds that copying a state to a new peer may take", above=0
    ),
    "peers.start_s": Changeable(300.0, "seconds within which the first peer must train", above=0),
    "peers.stop_s": Changeable(
        60.0, "seconds for peers to save and end; then they are killed", above=0
    ),
}
