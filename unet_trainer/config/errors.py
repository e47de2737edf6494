"""Errors that the user can fix, that end a run, or that keep it from being resumed."""


class UserError(ValueError):
    """Something the user can fix: shown as one message without a traceback, exit code 2."""

    exit_code = 2


class ConfigError(UserError):
    """The config cannot be used; the message lists every problem."""


class CheckpointError(UserError):
    """A checkpoint that cannot be used; the message names the file and the reason."""


class UnreadableFile(CheckpointError):
    """A checkpoint that the system does not let us read (permission, a failing disk): it may be whole."""


class TrainingFailed(RuntimeError):
    """Training or a prediction cannot go on; the message says why, what is saved and what to try. Exit code 3."""

    exit_code = 3


class NonFinite(RuntimeError):
    """NaN or infinity that skipping steps does not cure: in a training batch (`batch_number`, over the whole run), in a
    batch of validation (`val_batch`), or in the weights."""

    def __init__(self, what: str, batch_number: int | None = None, val_batch: int | None = None) -> None:
        super().__init__(what)
        self.batch_number = batch_number
        self.val_batch = val_batch


def missing_part(name: str) -> UserError:
    """For a run whose custom loss or model was not passed."""
    calls = "train(..., model=...) or load(..., model=...)" if name == "model" else f"train(..., {name}=...)"
    need = f"pass it from Python, {calls}; see docs/extending.md"
    return UserError(f"{name}: the run has a custom {name}, which no file holds: {need}")
