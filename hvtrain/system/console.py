"""Shows rank 0's messages on the console, writes each rank's to its own log file, and hides TensorFlow's.

A rank also writes its verdict on a failure, one line of JSON on stderr, which the launcher reads and hides.
"""

import json
import logging
import os
import queue
import re
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TextIO, TypeVar

from hvtrain.errors import RESTART_HELPS, THIS_RANK

T = TypeVar("T")

# Set for each rank by, in this order: horovodrun --gloo; Open MPI's mpirun, which horovodrun --mpi
# starts; MPICH and Intel MPI; srun. A Slurm batch script has a SLURM_PROCID too, but is not a task
# of a job step, so the size is read from the step's variable.
_RANK_VARIABLES = ("HOROVOD_RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")
SIZE_VARIABLES = ("HOROVOD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS")
# Holds the command line of a process that was started by hand. A signal to such a process reaches
# no other, since no launcher passes it on.
BY_HAND = "HVTRAIN_BY_HAND"
# How long a rank waits for another one that should report a failure first.
SECONDS_FOR_ANOTHER_RANK = 10.0
VERDICT_PREFIX = "hvtrain-verdict: "
UNSAVED = "before training began, so nothing was saved"
# Every process of a launch that hvtrain watches has this variable
# (launch/on_host.py calls it MARK).
_WATCHED = "HVTRAIN_LAUNCH"


log = logging.getLogger("hvtrain")
# Python's warnings go through a log too, so that only rank 0 shows them.
_LOGGERS = (log, logging.getLogger("py.warnings"))


class SignalFlag:
    """An event that a signal handler may set, for one waiting thread.

    threading.Event could deadlock: the handler may interrupt the very thread that holds the event's
    lock, which is not reentrant. SimpleQueue.put is reentrant, according to its documentation.
    """

    _is_set = False

    def __init__(self) -> None:
        self._wakes: queue.SimpleQueue[None] = queue.SimpleQueue()

    def set(self) -> None:
        self._is_set = True
        self._wakes.put(None)

    def is_set(self) -> bool:
        return self._is_set

    def wait(self, seconds: float) -> bool:
        """Waits up to `seconds` until the flag is set; returns whether it is."""
        if not self._is_set:
            with suppress(queue.Empty):
                self._wakes.get(timeout=seconds)
        return self._is_set


# If a signal arrives after this rank has failed, the launcher has seen another rank
# end, and that rank has reported by then.
signal_arrived = SignalFlag()
# True if the run was composed with tracebacks=true, on the command line or in a file.
shows_tracebacks = False
# File descriptor of this process's stderr, even while TensorFlow's messages are redirected.
_error_output = 2


def launched_rank() -> int:
    """Returns this process's rank according to its launcher, even before Horovod starts; 0 without a launcher."""
    return _first_number(_RANK_VARIABLES) or 0


def launched_size() -> int | None:
    """Returns the number of ranks that the launcher started; None without a launcher."""
    return _first_number(SIZE_VARIABLES)


def _first_number(names: Sequence[str]) -> int | None:
    values = (os.environ.get(name, "") for name in names)
    return next((int(value) for value in values if value.isdigit()), None)


def is_launched() -> bool:
    """True if a launcher started this process."""
    return launched_size() is not None


@contextmanager
def quiet_import(verbose: bool) -> Iterator[None]:
    """Hides the messages of the first import of TensorFlow and Keras, unless verbose or it fails.

    TensorFlow writes its first messages before it reads its log level, so no environment variable can
    silence them. A third of Keras's import time goes to scikit-learn and Matplotlib, for wrappers and
    galleries that no rank uses, so both packages are hidden from Keras.
    """
    if not verbose:
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
        logging.getLogger("tensorflow").setLevel(logging.ERROR)
        logging.getLogger("absl").setLevel(logging.ERROR)
    # Signal handlers write to _error_output, which stays the real stderr
    # while descriptor 2 is redirected.
    global _error_output
    left_out = {"sklearn", "matplotlib"} - set(sys.modules)
    sys.modules.update(dict.fromkeys(left_out))  # type: ignore[arg-type]
    sys.stderr.flush()
    console = _error_output = os.dup(2)
    # A file, since a pipe that nobody reads could fill up.
    with tempfile.TemporaryFile() as hidden:
        if not verbose:
            os.dup2(hidden.fileno(), 2)
        try:
            yield
        except Exception:
            hidden.seek(0)
            os.write(console, hidden.read())
            raise
        finally:
            sys.stderr.flush()
            os.dup2(console, 2)
            _error_output = 2
            os.close(console)
            for name in left_out:
                del sys.modules[name]


def start_log(is_chief: bool, level: int = logging.INFO) -> None:
    """Sends hvtrain's log, from this level on, and Python's warnings to the console, on the chief only."""
    logging.captureWarnings(True)
    handler = _ToStdout()
    handler.setLevel(logging.INFO if is_chief else logging.CRITICAL)
    for logger in _LOGGERS:
        logger.setLevel(level)
        # Otherwise a root logger set up by the user would show each line twice.
        logger.propagate = False
        logger.handlers = [handler]


def log_to_file(folder: Path, rank: int) -> None:
    """Adds a log file on this rank's host, FOLDER/rank-NNNN.log. Warns if it cannot be written."""
    path = folder / f"rank-{rank:04d}.log"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if folder.is_symlink() or path.is_symlink():
            raise OSError(f"{path} is behind a symbolic link, and may lie outside the run folder")
        handler = _LogFile(path, encoding="utf-8")
    except OSError as error:
        log.warning(f"rank {rank} keeps no log file: {error}")
        return
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    for logger in _LOGGERS:
        logger.addHandler(handler)


class _ToStdout(logging.StreamHandler):
    """Writes to the current sys.stdout, which a live display replaces to show text above it."""

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stdout
        super().emit(record)


class _LogFile(logging.FileHandler):
    """Warns once when the file can no longer be written, and then stops writing.

    Python's own handler would show tracebacks.
    """

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802
        for logger in _LOGGERS:
            logger.removeHandler(self)
        log.warning(f"{self.baseFilename} was not written: {sys.exc_info()[1]}")


def note_signal(*_: object) -> None:
    """Ends any wait for other ranks to report first.

    This is a handler for SIGTERM and SIGUSR1, or is called by one.
    """
    signal_arrived.set()


def take_signals(
    handler: Callable[..., object] | signal.Handlers, *numbers: signal.Signals
) -> None:
    """Installs a handler for signals, by default those that schedulers and launchers send.

    Does nothing in a thread other than the main one: Python allows no handlers there, and a run in such
    a thread was not started by a launcher.
    """
    if threading.current_thread() is threading.main_thread():
        for number in numbers or (signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, handler)


@contextmanager
def hold_signals() -> Iterator[Callable[[], None]]:
    """Holds signals back while a process is started, until the block calls release() or ends.

    Python drops exceptions that a handler raises inside the hooks around a fork, so Ctrl-C would be
    lost.
    """
    pending: list[int] = []
    handlers: dict[int, Any] = {}

    def release():
        while handlers:
            signal.signal(*handlers.popitem())
        while pending:
            signal.raise_signal(pending.pop())

    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            # A signal that is ignored here must stay ignored in the new process.
            if callable(signal.getsignal(number)):
                handlers[number] = signal.signal(number, lambda number, _: pending.append(number))
    try:
        yield release
    finally:
        release()


@dataclass(frozen=True)
class Verdict:
    """The rank at fault, the cause, and the exit code if known.

    In an elastic job the rank is HOST[SLOT]; None: unknown.
    """

    rank: int | str | None
    cause: str = ""
    code: int | None = None

    def line(self) -> str:
        """Returns the line to write; empty if there is no launcher to read and hide it."""
        return f"{VERDICT_PREFIX}{json.dumps(asdict(self))}\n" if _WATCHED in os.environ else ""


def read_verdict(line: str) -> Verdict | None:
    """Returns the verdict in a line; None for any other line."""
    if line.startswith(VERDICT_PREFIX):
        with suppress(TypeError, ValueError):
            return Verdict(**json.loads(line.removeprefix(VERDICT_PREFIX)))
    return None


def end_before_training(signum: int, *_: object) -> None:
    """Handles a signal that arrives before there is anything to save.

    Ends the process, with a message on rank 0.
    """
    rank = launched_rank()
    text = f"{signal.Signals(signum).name} arrived {UNSAVED}"
    lines = Verdict(rank, text, RESTART_HELPS).line()
    if rank == 0:
        lines += f"hvtrain: {text}\n"
    os.write(_error_output, lines.encode())
    # The signal may have interrupted Python anywhere, such as in an
    # import, so nothing is cleaned up.
    os._exit(RESTART_HELPS)


def in_background(
    action: Callable[..., object], *arguments: Any, **options: Any
) -> threading.Thread:
    """Calls the action in a thread, which does not keep the process alive; returns the thread."""
    thread = threading.Thread(target=action, args=arguments, kwargs=options, daemon=True)
    thread.start()
    return thread


def within(seconds: float, action: Callable[[], T], otherwise: T) -> T:
    """Returns the action's result, or `otherwise` if it fails or takes longer than `seconds`.

    A slow action is left running in its thread.
    """
    result = [otherwise]

    def act():
        with suppress(Exception):
            result[0] = action()

    in_background(act).join(seconds)
    return result[0]


def call_later(seconds: float, action: Callable[..., object], *arguments: Any) -> threading.Timer:
    """Calls the action after this many seconds, and returns the timer.

    The timer's thread does not keep the process alive.
    """
    timer = threading.Timer(seconds, action, arguments)
    timer.daemon = True
    timer.start()
    return timer


def say_stopping() -> None:
    """Tells the user what the first Ctrl-C does.

    Writes in a separate thread, because the signal may have interrupted a write in this one. Writes
    through sys.stderr, because a live display replaces that to stay below the text.
    """

    def say():
        sys.stderr.write("\nhvtrain: Ctrl-C: saving and stopping; press it again to exit now\n")
        sys.stderr.flush()

    threading.Thread(target=say).start()


def say_error(
    message: str,
    rank: int = 0,
    wait_seconds: float = 0.0,
    is_repeated: bool = False,
    culprit: int | None = THIS_RANK,
) -> None:
    """Writes one line to stderr and to this rank's log file, and a verdict for a launcher.

    Args:
        rank: This rank; 0 in a launcher too.
        wait_seconds: How long to wait for the rank that reports first. A signal ends the wait.
        is_repeated: True if another rank reports the same error, unless that rank was lost. If a signal
            ended the wait, that rank has reported, and nothing is written to stderr.
        culprit: The rank at fault; None if unknown.
    """
    record = log.makeRecord(log.name, logging.ERROR, __file__, 0, message, (), None)
    for handler in log.handlers:
        if isinstance(handler, logging.FileHandler):
            handler.handle(record)
    if wait_seconds and signal_arrived.wait(wait_seconds) and is_repeated:
        return

    if culprit == THIS_RANK:
        culprit = rank
    # The verdict's own field has the rank, so the message need not repeat it. Cut,
    # since mpirun splits longer lines.
    cause = re.sub(rf"^rank {culprit} on \S+?(?: failed)?: ", "", message)[:2000]
    line = f"hvtrain: {message}\n"
    if rank and not message.startswith(f"rank {rank} "):
        line = f"hvtrain: rank {rank}: {message}\n"
    verdict = Verdict(culprit, cause).line()
    # The launcher shows the line of the rank at fault.
    if verdict and is_repeated and culprit not in (rank, None):
        line = ""
    # A single write: launchers make Python's output unbuffered and
    # put their mark before each piece.
    write(sys.stderr, f"{verdict}{line}")


def write(stream: TextIO, text: str) -> None:
    """Writes text to a stream of the console, and escapes characters that the stream cannot encode.

    If a write fails, because the reader is gone or the disk is full, this and all later output is discarded.
    The run and its logs continue in any case.
    """
    try:
        try:
            stream.write(text)
        except UnicodeEncodeError as error:  # A terminal with another encoding.
            stream.write(text.encode(error.encoding, "backslashreplace").decode(error.encoding))
        stream.flush()
    except OSError:  # The reader is gone (| head), or the disk is full (> FILE).
        # A write to a closed pipe would fail again at exit, with a message from Python.
        null_device = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null_device, stream.fileno())
        os.close(null_device)


def progress(text: str) -> None:
    """Shows on a terminal what is running, until the next call; "" clears the line."""
    if sys.stderr.isatty():
        # Cut to the terminal's width, since a line that wraps could not be cleared.
        columns = shutil.get_terminal_size().columns
        sys.stderr.write(f"\r\033[K{text[: columns - 1]}")
        sys.stderr.flush()
