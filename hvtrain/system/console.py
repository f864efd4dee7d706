"""What a rank says and where: rank 0 on the console, every rank in its own log file, TensorFlow nowhere. Pure."""

from __future__ import annotations

import logging
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

# Set by horovodrun --gloo; Open MPI's mpirun; MPICH and Intel MPI; srun.
_RANK_VARIABLES = ("HOROVOD_RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")


SECONDS_FOR_ANOTHER_RANK = 5.0
# Where this rank has failed, one that came means that the launcher saw another rank end, which has spoken by then.
_signal_came = threading.Event()


def launched_rank() -> int:
    """This process's rank as its launcher says it, before Horovod starts; 0 without a launcher."""
    return next((int(os.environ[name]) for name in _RANK_VARIABLES if os.environ.get(name, "").isdigit()), 0)


def is_launched() -> bool:
    """True when a launcher started this process."""
    return any(name in os.environ for name in _RANK_VARIABLES)


def quiet_tensorflow() -> None:
    """Keeps the notes of TensorFlow and CUDA off the console. Before the first import of TensorFlow."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    logging.getLogger("tensorflow").setLevel(logging.ERROR)
    logging.getLogger("absl").setLevel(logging.ERROR)


@contextmanager
def native_notes_held(enabled: bool = True) -> Iterator[None]:
    """Holds back what native code writes to the error output, and shows it only when the block fails.

    TensorFlow's first notes come before it reads its own log level, so no variable can silence them.
    """
    if not enabled:
        yield
        return
    sys.stderr.flush()
    console = os.dup(2)
    with tempfile.TemporaryFile() as held:
        os.dup2(held.fileno(), 2)
        try:
            yield
        except BaseException:
            held.seek(0)
            os.write(console, held.read())
            raise
        finally:
            sys.stderr.flush()
            os.dup2(console, 2)
            os.close(console)


def start_log(is_chief: bool) -> None:
    """Sends the log of hvtrain, and Python's warnings, to the chief's console."""
    logging.captureWarnings(True)
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(logging.Formatter("%(message)s"))
    handler.setLevel(logging.INFO if is_chief else logging.CRITICAL)
    for name in ("hvtrain", "py.warnings"):
        logger = logging.getLogger(name)
        logger.setLevel(logging.INFO)
        logger.propagate = False
        logger.handlers = [handler]


def log_to_file(folder: Path, rank: int) -> None:
    """Adds this rank's own file, folder/rank-NNNN.log, on its own host; without one where it cannot be written."""
    path = folder / f"rank-{rank:04d}.log"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if folder.is_symlink() or path.is_symlink():
            raise OSError(f"{path} is behind a symbolic link, and may lie outside the run folder")
        handler = _LogFile(path, encoding="utf-8")
    except OSError as error:
        logging.getLogger("hvtrain").warning("rank %d keeps no log file: %s", rank, error)
        return
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    for name in ("hvtrain", "py.warnings"):
        logging.getLogger(name).addHandler(handler)


class _LogFile(logging.FileHandler):
    """Says once that the file cannot be written any more, and falls silent; Python's own would show a traceback."""

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802
        for name in ("hvtrain", "py.warnings"):
            logging.getLogger(name).removeHandler(self)
        logging.getLogger("hvtrain").warning("%s was not written: %s", self.baseFilename, sys.exc_info()[1])


def note_signal(*_: object) -> None:
    """What takes SIGTERM or SIGUSR1 calls it; or is it, as a handler: no wait for other ranks to speak after that."""
    _signal_came.set()


def take_signals(handler: Callable[..., object]) -> None:
    """What schedulers and launchers send goes to the handler, and to none before it.

    Python lets only the main thread take signals; a run in another one is not a launched one, and takes none.
    """
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, handler)


def say_error(message: str, rank: int, wait_seconds: float | None = None, is_repeated: bool = False) -> None:
    """One line on the error output, and in this rank's log file.

    wait_seconds: let another rank, whose message comes first, speak; default: where this one is not rank 0. Once a
    signal has come there is no wait.
    is_repeated: that other rank says the same, unless it was lost; so say nothing where a signal came.
    """
    _note(message)
    wait_seconds = (SECONDS_FOR_ANOTHER_RANK if rank else 0.0) if wait_seconds is None else wait_seconds
    if wait_seconds and _signal_came.wait(wait_seconds) and is_repeated:
        return
    where = f"rank {rank}: " if rank and not message.startswith(f"rank {rank} ") else ""
    # One write: launchers set Python's output unbuffered and put their mark before each piece.
    sys.stderr.write(f"hvtrain: {where}{message}\n")
    sys.stderr.flush()


def _note(message: str) -> None:
    """Into this rank's log file alone."""
    logger = logging.getLogger("hvtrain")
    record = logger.makeRecord(logger.name, logging.ERROR, __file__, 0, message, (), None)
    for handler in logger.handlers:
        if isinstance(handler, logging.FileHandler):
            handler.handle(record)
