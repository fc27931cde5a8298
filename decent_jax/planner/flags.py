"""The planner's commands in words: their flags, what a value must be, and their examples."""

import argparse
import math
from collections.abc import Callable
from typing import Any, NamedTuple

from decent_jax.ground.format import shown, split_outside_brackets
from decent_jax.plan.orders import ORDERS
from decent_jax.planner import outputs, predict, recommend
from decent_jax.planner.build_schedule import NAME as BUILT
from decent_jax.planner.compute_times import LONGEST_S, SHORTEST_S
from decent_jax.planner.network import PRESETS
from decent_jax.planner.runtime import WIRES
from decent_jax.topology import NAMES

EXAMPLES = {
    "network": f"""\
examples:
  decent-jax planner network --network nvlink_25gbe --nodes 4 --devices_per_node 8
      an imagined cluster: four machines of eight GPUs on NVLink, 25 Gbit/s between them
  decent-jax planner network --network network.json
      a file: checked (units, missing entries, asymmetry), then summarised
  decent-jax planner network --network two_racks_25gbe --nodes 4 --devices_per_node 2 \\
      --save two_racks.json
      write it as JSON, to edit by hand or to use as a plan's network

For a plan that train.py follows, the names in the file must be those of the cluster: HOST/k, the
name of a host and the number of the device in it (node0/0 becomes gpu17/0).

presets: {", ".join(PRESETS)}
""",
    "predict": """\
examples:
  decent-jax planner predict --network nvlink_25gbe --nodes 2,4,8 --devices_per_node 4 \\
      --parameters 124e6 --compute_s 0.2 --sigma 0.1
      GPT-2 small on two to eight nodes, 200 ms forward and backward per replica, 10% variation
  decent-jax planner predict --network nvlink_25gbe --devices_per_node 4 \\
      --config configs/gpt2_openwebtext.py:decentralized --compute_s 0.178 --out predicted.png
      model and number of replicas from a config; the bars as a picture
  decent-jax planner predict --network network.json --parameters 124e6 \\
      --trace runs/alone --timeline step.png
      compute time and its variation from a run of one replica; a Gantt chart of a few steps
  decent-jax planner predict --network network.json --parameters 4.2e6 \\
      --measured rows.jsonl --fit compute_s,sigma --fit_on all_reduce
      against measured step times, two constants fitted to the all_reduce rows

reading the table: compute is what one replica would take alone; exposed communication is what
nothing hides; stragglers is what is lost to compute times that vary. They add up to the step.
""",
    "recommend": """\
examples:
  decent-jax planner recommend --network nvlink_25gbe --nodes 4 --devices_per_node 8 \\
      --parameters 124e6 --compute_s 0.2 --sigma 0.1
  decent-jax planner recommend --network dtfm_case5 --parameters 1.3e9 --compute_s 2 \\
      --wires float32,bfloat16,int8 --largest_slow_down 2
      64 machines around the world, compressed messages allowed
  decent-jax planner recommend --network network.json \\
      --config configs/gpt2_openwebtext.py:decentralized --compute_s 0.178 --plan plan.json
      then: train.py --config ... --config.cluster.plan=plan.json

Least (seconds per step) x (steps, relative to all-reduce). The second factor is a model calibrated
on published runs of 4 and 8 replicas; pydoc decent_jax.planner.recommend says how, and what it does
not know. --largest_slow_down is the quality you ask for.
""",
    "place": """\
examples:
  decent-jax planner place --network dtfm_case5 --parameters 124e6 \\
      --schedule one_peer_exp --time_limit_s 2
      eight regions: order the replicas so that the schedule's rounds use fast links
  decent-jax planner place --network network.json --parameters 124e6 --schedule built \\
      --compute_s 0.2 --time_limit_s 2 --plan plan.json
      a schedule made for this network; then: train.py --config.cluster.plan=plan.json
  decent-jax planner place --network dtfm_case5 --parameters 1.3e9 --stages 8 \\
      --replicas 8 --pipeline_bytes 0.471e9 --time_limit_s 2 --plan plan.json
      DT-FM: eight pipeline stages in data-parallel groups of eight; then: train.py with
      --config.pipeline.stages=8 --config.num_replicas=8 --config.cluster.plan=plan.json
  decent-jax planner place --network dtfm_case4 --parameters 1.3e9 --stages 8 \\
      --replicas 8 --pipeline_bytes 0.537e9 --time_limit_s 2 --micro_batches 64 --compute_s 19 \\
      --layers 24 --output_layers 2
      the same, with machines exchanged until a step is shortest, and what it takes then

disagreement is the age of the drift between replicas that mixing leaves: less is better.
""",
}


def number(low: float, high: float, kind: type = float) -> Callable[[str], Any]:
    """The ``type`` of a flag: a number from ``low`` to ``high``."""

    def read(text: str) -> float:
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        if not low <= value <= high:
            what = "a whole number" if kind is int else "a number"
            raise argparse.ArgumentTypeError(
                f"must be {what} from {low:g} to {high:.7g}, got {shown(text)}"
            )
        return value

    return read


def counts(most: int) -> Callable[[str], list[int]]:
    """The ``type`` of a flag: whole numbers from 1 to ``most`` between commas."""
    count = number(1, most, int)
    return lambda text: [count(part) for part in text.split(",")]


SECONDS = number(SHORTEST_S, LONGEST_S)
NOT_NEGATIVE_S = number(0, LONGEST_S)
COUNT = number(1, 2**20, int)
PARAMETERS = number(1, 1e13)
BYTES = number(0, 1e15)
TEXTS = split_outside_brackets


class Flag(NamedTuple):
    """A flag; its default, if any, is added to its help."""

    metavar: str | None
    help: str
    type: Callable[[str], Any] = str
    default: Any = None
    choices: tuple[str, ...] | None = None


NETWORK = {
    "network": Flag("NAME|FILE", "a preset, or the JSON or .npz of a measured network"),
    "nodes": Flag(
        "N,N", "machines of a preset; of a file, the first N (default: all)", counts(2**20)
    ),
    "devices_per_node": Flag(
        "L", "devices per machine of a preset (default: config.local_size)", COUNT
    ),
}
MODEL = {"parameters": Flag("P", "number of parameters of the model", PARAMETERS)}
WORKLOAD = MODEL | {
    "config": Flag("FILE[:ARGUMENTS]", "config file of train.py"),
    "late_parameters": Flag(
        "P",
        "number of those whose gradient is complete only at the end of the backward pass: a tied "
        "embedding, which all-reduce cannot hide (default: 0, or from --config)",
        number(0, 1e13),
    ),
    "compute_s": Flag("S", "seconds of forward and backward of one replica", SECONDS),
    "update_s": Flag("S", "seconds of the optimizer", NOT_NEGATIVE_S, 0.0),
    "trace": Flag(
        "DIR|FILE",
        "--workdir of a run without communication: its step times instead of --compute_s "
        "and --sigma",
    ),
    "sigma": Flag(
        "S", "compute times are lognormal with this spread: 0.1 is about 10%%", number(0, 5), 0.0
    ),
    "bucket_bytes": Flag(
        "B",
        "bytes per bucket of all-reduce's gradients; inf: all after the backward pass (default: "
        "whichever is fastest)",
        number(1000, math.inf),
    ),
}
SEARCH = {
    "plan": Flag("FILE.json", "write the plan for train.py", outputs.file),
    "time_limit_s": Flag("S", "seconds that the search may take", SECONDS, 5.0),
    "seed": Flag(None, "seed of the search", number(0, 2**63 - 1, int), 0),
}
EVERYTHING = ", ".join((*predict.ALL_REDUCES, *NAMES))
COMMANDS: dict[str, dict[str, dict[str, Flag]]] = {  # command: group of flags: flag
    "network": {
        "": NETWORK | {"save": Flag("FILE.json", "write the network as JSON", outputs.json_file)}
    },
    "predict": {
        "": NETWORK
        | WORKLOAD
        | {
            "algorithms": Flag(
                "A,B", f"some of {EVERYTHING}, with their parameters (default: all)", TEXTS
            ),
            "scaling": Flag(
                None,
                "with several --nodes: weak: a replica's share of the batch stays; strong: it "
                "shrinks as replicas are added, since the whole batch stays",
                default="weak",
                choices=("weak", "strong"),
            ),
            "mix_every": Flag("H", "steps per round", number(1, 1000, int), 1),
            "wire": Flag(None, "format of gossip's messages", str, "float32", WIRES),
            "out": Flag("FILE.png", "draw the table as bars", outputs.picture),
            "timeline": Flag("FILE.png", "draw a few steps as a Gantt chart", outputs.picture),
            "measured": Flag("FILE", "JSON lines of measured step times"),
            "fit": Flag("A,B", "which of compute_s, sigma, bandwidth to fit to these", TEXTS),
            "fit_on": Flag("A,B", "algorithms whose rows are fitted", TEXTS, "all_reduce"),
        }
    },
    "recommend": {
        "": NETWORK
        | WORKLOAD
        | {
            "schedules": Flag("A,B", f"some of {', '.join(NAMES)} (default: all)", TEXTS),
            "mix_every": Flag("H,H", "steps per round to try", counts(1000), "1,2,4,8"),
            "wires": Flag(
                "W,W", f"formats of messages to try, of {', '.join(WIRES)}", str, "float32"
            ),
            "tokens_per_parameter": Flag(
                "D",
                "length of the run; the longer, the less gossip loses",
                number(1e-6, 1e9),
                recommend.TOKENS_PER_PARAMETER,
            ),
            "largest_slow_down": Flag(
                "S",
                "consider schedules that need at most S times the steps of all-reduce",
                number(1, 1e6),
                1.5,
            ),
        }
        | SEARCH
    },
    "place": {
        "": NETWORK
        | MODEL
        | {"out": Flag("FILE.png", "draw the placement on the network", outputs.picture)}
        | SEARCH,
        "gossip: order the replicas of a schedule": {
            "schedule": Flag(
                "NAME",
                f"one of {', '.join(NAMES)}; or {BUILT}: one made for this network",
                default="one_peer_exp",
            ),
            "max_degree": Flag(None, f"with {BUILT}: messages per round", COUNT, 1),
            "compute_s": Flag("S", "seconds of computing that hide a round", NOT_NEGATIVE_S, 0.0),
        },
        "pipeline stages in data-parallel groups (DT-FM)": {
            "stages": Flag("K", "pipeline stages", COUNT),
            "replicas": Flag("R", "pipelines; they take K x R devices", COUNT),
            "pipeline_bytes": Flag(
                "B", "bytes of activations per step from one stage to the next", BYTES
            ),
            "device_memory": Flag("FILE.json", "list of bytes, one per device of the network"),
            "stage_memory": Flag("B", "bytes that a stage needs", BYTES, 0.0),
            "micro_batches": Flag(
                "M",
                "micro-batches of a pipeline. With --compute_s, the seconds of forward and "
                "backward of a pipeline's batch on one device, place predicts the time of a step, "
                "and exchanges machines until it is shortest (for at most --time_limit_s more)",
                COUNT,
            ),
            "averaging": Flag(
                None,
                "averaging between the pipelines in that step",
                default="gossip",
                choices=("gossip", "all_reduce"),
            ),
            "order": Flag(None, "order of micro-batches in that step", str, "1f1b", ORDERS),
            "layers": Flag("L", "layers of the model: also say how many each stage gets", COUNT),
            "output_layers": Flag("X", "cost of the output layer, in layers", number(0, 1e4), 0.0),
            "speeds": Flag("FILE.json", "list of relative speeds, one per device of the network"),
        },
    },
}


def add(parser: argparse.ArgumentParser, command: str) -> None:
    """The flags of a command, and what only a config says."""
    parser.set_defaults(num_replicas=None, local_size=None, row_length=768.0)
    parser.set_defaults(algorithm="accum_adam")
    for title, flags in COMMANDS[command].items():
        group = parser.add_argument_group(title) if title else parser
        for name, flag in flags.items():
            how: dict[str, Any] = flag._asdict() | {"required": name == "network"}
            how["help"] += "" if flag.default is None else " (default: %(default)s)"
            group.add_argument(f"--{name}", **how)
