"""Train a model on replicas that gossip instead of all-reducing gradients; see --help."""

import sys

from decent_jax.train import ConfigError, Interrupted, TrainingFailed, flags, run


def main(argv: list[str]) -> int:
    """The exit code: 0 done, 1 training failed, 2 never started, 128 + signal interrupted."""
    try:
        config, workdir = flags.parse(argv)
        run(config, workdir)
    except ConfigError as error:
        print(f"train.py: {error}", file=sys.stderr)
        return 2
    except TrainingFailed as error:
        print(f"train.py: {error}", file=sys.stderr)
        return 1
    except Interrupted as error:
        print(f"train.py: {error}", file=sys.stderr)
        return 128 + error.signal
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
