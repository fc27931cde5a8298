"""Train a model on replicas that gossip instead of all-reducing gradients; see --help."""

import sys

from decent_jax.cluster import watch
from decent_jax.errors import (
    PEER_LOST,
    CheckpointError,
    Interrupted,
    PeerLost,
    TrainingFailed,
)
from decent_jax.train import ConfigError, flags, run


def main(argv: list[str]) -> int:
    """0 done, 1 failed, 2 never started, 75 another process was lost, 128 + signal interrupted."""
    try:
        config, workdir = flags.parse(argv)
        run(config, workdir)
    except ConfigError as error:
        print(f"train.py: {error}", file=sys.stderr)
        return 2
    except (TrainingFailed, CheckpointError) as error:
        print(f"train.py: {error}", file=sys.stderr)
        return 1
    except PeerLost as error:
        print(f"train.py: {error}", file=sys.stderr)
        return PEER_LOST
    except OSError as error:  # a full disk, a folder that went away
        said = f"{type(error).__name__}: {error}, with --workdir {workdir}"  # not all name a file
        print(f"train.py: {said}; once mended, the same command continues", file=sys.stderr)
        return 1
    except Interrupted as error:
        print(f"train.py: {error}", file=sys.stderr)
        return 128 + error.signal
    except KeyboardInterrupt:  # outside the loop, which saves before it leaves
        print("train.py: interrupted; the same command continues", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    code = main(sys.argv[1:])
    if code:
        watch.leave(code)
    sys.exit(code)
