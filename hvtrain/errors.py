"""The errors that a user can cause. Each message says what came, what was needed and what to do.

Every command prints the message of a UserError as one line, without a traceback. Any other exception is a defect, in
hvtrain or in the user's own code, and is shown in full.
"""

RESTART_HELPS = 75  # sysexits.h: EX_TEMPFAIL. Every other code says that a restart cannot help.
INTERRUPTED = 130  # what shells report after Ctrl-C
THIS_RANK = -1


class UserError(Exception):
    """An error that a user can fix by its message alone.

    spokesman: the rank that speaks first where all ranks raise it. culprit: the rank at fault; None: nobody knows.
    """

    exit_code = 2
    spokesman = 0
    culprit: int | None = THIS_RANK
    # Before that of RuntimeError and the like: TensorFlow keeps the class of an error out of a traced function only
    # if this is its __init__.
    __init__ = Exception.__init__


class ConfigError(UserError, ValueError):
    """A setting that is unknown, of the wrong type, out of range, or in conflict with another."""


class DataError(UserError, ValueError):
    """A data set that is missing, damaged, or not what it was said to be."""


class CheckpointError(UserError, RuntimeError):
    """A checkpoint that cannot be written, or does not fit the model that is to continue from it."""


class TrainingError(UserError, ArithmeticError):
    """A training that cannot continue: a loss or gradient is not finite."""


class StorageError(UserError, RuntimeError):
    """Results that cannot be written."""


class RankError(UserError, RuntimeError):
    """Ranks that do not train together: nothing reduced, one GPU shared, settings that differ."""


class LostRankError(UserError, RuntimeError):
    """A rank is gone or makes no progress. The run's settings are not the cause, so a restart may help."""

    exit_code = RESTART_HELPS
    culprit = None


class BusyError(UserError, RuntimeError):
    """Another run uses something, and will release it."""

    exit_code = RESTART_HELPS


class FailedRankError(UserError, RuntimeError):
    """Another rank failed and said why; this one stops because of it."""

    exit_code = 1
    culprit = None


class Stopped(SystemExit):
    """A run that a signal asked to stop. It is saved, and can be started again.

    Exit code INTERRUPTED after Ctrl-C, else RESTART_HELPS: a scheduler asked it to make room.
    """
