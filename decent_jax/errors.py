"""How a run is refused, and how one ends when it does not end well."""


class ConfigError(ValueError):
    """A config that cannot be run; the message is one sentence that says why and what to do."""


class DataError(ValueError):
    """Data or a folder that cannot be used; the message says why and what to do."""


class RunError(Exception):
    """A run folder that cannot be read; the message says why in a sentence."""


class TrainingFailed(RuntimeError):
    """Training cannot go on; the message names the step and the last good checkpoint."""


class CheckpointError(RuntimeError):
    """No checkpoint can be used; the message says which were tried and why each failed."""


class Interrupted(RuntimeError):
    """Ctrl-C or SIGTERM came; a checkpoint was saved. ``signal`` is its number."""

    def __init__(self, message: str, number: int):
        super().__init__(message)
        self.signal = number


PEER_LOST = 75  # exit code (EX_TEMPFAIL): this process is well, another was lost; start again


class PeerLost(RuntimeError):
    """An exchange with other processes failed; where the lost one is known, the process ends."""
