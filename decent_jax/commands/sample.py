"""Continue a prompt with the consensus model of a run.

    decent-jax sample --workdir runs/quickstart --prompt "def main("

A line of dashes follows each continuation.
"""

from decent_jax.ground.command_line import command, model_parser
from decent_jax.ground.fields import Field
from decent_jax.train.saved_model import TrainedRun

FLAGS = {
    "tokens": Field(200, "number of tokens to add", at_least=1, at_most=10**6),
    "samples": Field(1, "number of continuations", at_least=1, at_most=10**4),
    "temperature": Field(0.8, "divisor of the logits; 0: greedy", at_least=0),
    "top_k": Field(0, "sample from the k most likely tokens; 0: all", at_least=0, at_most=2**24),
    "seed": Field(0, "random seed", at_least=0, at_most=2**63 - 1),
}


@command("sample")
def main(arguments: list[str] | None = None) -> int:
    """Run the command; returns its exit code: 0, or 2 after one sentence on stderr."""
    parser = model_parser("sample", __doc__)
    parser.add_argument("--prompt", default="", help="text to continue (default: a new document)")
    parser.add_fields(FLAGS)
    options = vars(parser.parse_args(arguments))
    run = TrainedRun(options.pop("workdir"), options.pop("which"))
    for text in run.call("sample", "continue a prompt", **options):
        print(text, "-" * 80, sep="\n")
    return 0
