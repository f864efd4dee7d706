"""The errors that a user can meet. Each message says what came, what was needed and what to do.

The door (`python -m hvtrain`) prints the message of a UserError as one line and no traceback;
anything else is a defect of ours, or of the user's own code, and is shown whole.
"""

from __future__ import annotations

RESTART_HELPS = 75  # sysexits.h: EX_TEMPFAIL. Every other code says that a restart cannot help.


class UserError(Exception):
    """An error whose message is enough to mend it. Where all ranks meet it, rank `spokesman` says it first."""

    exit_code = 2
    spokesman = 0
    # Before that of RuntimeError and the like: TensorFlow keeps the class of an error out of a traced function only
    # if this is its __init__.
    __init__ = Exception.__init__


class ConfigError(UserError, ValueError):
    """A setting that cannot be: unknown, of the wrong type, out of range, or at odds with another."""


class DataError(UserError, ValueError):
    """A data set that is missing, damaged, or not what it was said to be."""


class CheckpointError(UserError, RuntimeError):
    """A checkpoint that cannot be written, or does not fit the model that is to go on from it."""


class TrainingError(UserError, ArithmeticError):
    """A training that cannot go on: a loss or gradient that is not finite."""


class StorageError(UserError, RuntimeError):
    """Results that cannot be written."""


class RankError(UserError, RuntimeError):
    """Ranks that do not train together: nothing reduced, one GPU shared, settings that differ."""


class LostRankError(UserError, RuntimeError):
    """A rank is gone or makes no progress, through no fault of the run's settings: the same line may go on."""

    exit_code = RESTART_HELPS


class BusyError(UserError, RuntimeError):
    """Something that another run is using, and will leave."""

    exit_code = RESTART_HELPS


class FailedRankError(UserError, RuntimeError):
    """Another rank failed, and said why; this one stops because of it."""

    exit_code = 1


class Preempted(SystemExit):
    """A run that a signal told to make room: saved, and worth the same line again. Exit code RESTART_HELPS."""

    def __init__(self) -> None:
        super().__init__(RESTART_HELPS)
