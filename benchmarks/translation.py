"""A small Transformer on real sentence pairs, 8 replicas: gossip compared with all-reduce.

    python benchmarks/translation.py --data data/tatoeba_en_de --workdir runs/tatoeba
    python benchmarks/translation.py --data data/tatoeba_en_de --workdir runs/search --seeds 100 \\
        --rates 0.3 1 3 --config.steps=300

``configs/tatoeba_en_de.py`` says how --data is prepared. Every run is that config with one arm and
one seed, the same budget for all; --config.NAME=VALUE changes all of them. Runs that are finished
in the working directory are not repeated. With several --rates, the learning rate is multiplied by
each.

Prints the table of docs/translation.md: of the consensus model at the last step, BLEU and METEOR of
the test set; tokens are real ones, of sources and targets; the time is that of training without
compiling and evaluating.
"""

import statistics
import sys
from pathlib import Path

import arms
import commands

CONFIG = Path(__file__).resolve().parents[1] / "configs" / "tatoeba_en_de.py"
ARMS = ("all_reduce", "accum_adam", "accum_adam_ring", "accum_adam_complete")


def main(argv: list[str] | None = None) -> int:
    """0 once the table is printed."""
    parser = commands.parser(__doc__)
    parser.add_argument("--data", required=True, help="prepared folder")
    arms.add_arguments(parser, ARMS, seeds=(0,))
    parsed, changes = parser.parse_known_args(argv)
    changes.append(f"--config.data.path={parsed.data}")
    arms.compare(CONFIG, parsed.arms, parsed, changes, results)
    return 0


def results(summary: dict, metrics: list[dict]) -> dict[str, float]:
    """What the table shows of a run."""
    final, test = summary["final"], summary["test"]
    timed = [row for row in metrics if "perf/tokens_per_s" in row]
    return {
        "BLEU": test["bleu"],
        "METEOR": test["meteor"],
        "loss": final["eval/loss"],
        "consensus distance": final["eval/consensus_distance"],
        "seconds": summary["training_seconds"],
        "tokens/s": statistics.median(row["perf/tokens_per_s"] for row in timed),
        "padding %": 100 * summary["padding_fraction"],
        **arms.times(metrics),
    }


if __name__ == "__main__":
    sys.exit(main())
