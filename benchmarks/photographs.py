"""A narrow ResNet-18 on real photographs, 8 replicas, four arms over several seeds.

    python benchmarks/photographs.py --images CLOTHING_IMAGES --workdir runs/photographs
    python benchmarks/photographs.py --images CLOTHING_IMAGES --workdir runs/search --seeds 100 \\
        --rates 0.3 1 3 --config.model.width=16 --config.epochs=10

Every run is ``configs/clothing_images.py`` with one arm and one seed, the same budget for all;
--config.NAME=VALUE changes all of them. Runs that are finished in the working directory are not
repeated, so more seeds can be added later. With several --rates, the learning rate is multiplied by
each.

Prints the table of docs/images.md: mean over the seeds and standard deviation between them, of the
consensus model at the last step; the time is that of training without compiling and evaluating.
"""

import sys
from pathlib import Path

import arms
import commands

CONFIG = Path(__file__).resolve().parents[1] / "configs" / "clothing_images.py"
ARMS = ("all_reduce", "accum_adam", "accum_adam_ring", "momentum_sgd")


def main(argv: list[str] | None = None) -> int:
    """0 once the table is printed."""
    parser = commands.parser(__doc__)
    parser.add_argument("--images", required=True, help="folder with train/ and val/")
    arms.add_arguments(parser, ARMS, seeds=(0, 1, 2))
    parsed, changes = parser.parse_known_args(argv)
    changes.append(f"--config.data.path={parsed.images}")
    arms.compare(CONFIG, parsed.arms, parsed, changes, results)
    return 0


def results(summary: dict, metrics: list[dict]) -> dict[str, float]:
    """What the table shows of a run."""
    final = summary["final"]
    return {
        "top-1 %": 100 * final["eval/top1"],
        "top-5 %": 100 * final["eval/top5"],
        "loss": final["eval/loss"],
        "consensus distance": final["eval/consensus_distance"],
        "seconds": summary["training_seconds"],
        **arms.times(metrics),
    }


if __name__ == "__main__":
    sys.exit(main())
