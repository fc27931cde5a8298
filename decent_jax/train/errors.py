"""How a run ends when it does not end well; one that never starts raises ConfigError."""


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
