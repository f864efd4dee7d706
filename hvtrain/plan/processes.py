"""Starting and ending the processes of a contender."""

import contextlib
import fcntl
import json
import os
import pty
import signal
import socket
import struct
import sys
import termios
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from subprocess import DEVNULL, STDOUT, Popen, TimeoutExpired
from typing import Any

from hvtrain.errors import LostRankError
from hvtrain.plan import process_report

HOROVOD = ("horovodrun-mpi", "horovodrun-gloo")
SECONDS_FOR_A_RUN = 900.0
ON_TERMINAL = {"TERM": "xterm-256color", "CI": ""}


def launch_and_report(
    way: str,
    module: str,
    words: Sequence[str],
    size: int,
    folder: Path,
    threads: int,
    more: Mapping[str, str],
    on_terminal: bool = False,
) -> list[dict[str, Any]]:
    """Runs `python -m module words` in `size` processes and returns their reports.

    Raises LostRankError, which names the file with its output, if one fails.
    """
    folder.mkdir(parents=True)
    variables = {
        **os.environ,
        **more,
        process_report.FILE: str(folder / "report"),
        **dict.fromkeys(("TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS", "OMP_NUM_THREADS"), str(threads)),
        "TF_CPP_MIN_LOG_LEVEL": "2",
        **(ON_TERMINAL if on_terminal else {}),
    }
    if way == "servers":
        del variables["TF_NUM_INTEROP_THREADS"]  # With one thread, coordinator and servers deadlock.
    log = folder / "output.txt"
    processes = []
    with log.open("wb") as file, _terminal(file.fileno()) if on_terminal else contextlib.nullcontext(file) as output:
        for command, own in _commands(way, [sys.executable, "-m", module, *words], size, on_terminal):
            env = {**variables, **own, process_report.BEGAN: repr(time.time())}
            processes.append(
                Popen(command, env=env, stdin=DEVNULL, stdout=output, stderr=STDOUT, start_new_session=True)
            )
        codes = _wait(processes, processes[:1] if way == "servers" else processes)
    reports = [json.loads(path.read_text()) for path in sorted(folder.glob("report.*"))]
    if any(codes) or len(reports) != size:
        last = log.read_text(errors="replace").strip().rpartition("\n")[2]
        found = f"{module} ended with {codes} and {len(reports)} of {size} reports"
        raise LostRankError(f"{found}; its output is in {log} and ends: {last}")
    return reports


@contextlib.contextmanager
def _terminal(log: int) -> Iterator[int]:
    """A terminal of 80 columns, whose output goes to the log."""
    own, its = pty.openpty()
    fcntl.ioctl(its, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))

    def copy() -> None:
        with contextlib.suppress(OSError):  # The end, once nobody holds the terminal any more.
            while data := os.read(own, 65536):
                os.write(log, data)

    reader = threading.Thread(target=copy, daemon=True)
    reader.start()
    try:
        yield its
    finally:
        os.close(its)
        reader.join(5)
        os.close(own)


def _commands(way: str, line: list[str], size: int, on_terminal: bool) -> list[tuple[list[str], dict[str, str]]]:
    """The commands to start at once, each with its own variables."""
    if way in HOROVOD:
        # On a terminal horovodrun draws what rank 0 sends.
        launcher = (
            [f"{sys.prefix}/bin/horovodrun"]
            if on_terminal
            else [sys.executable, "-m", "hvtrain.launch.horovod_launcher"]
        )
        return [([*launcher, f"--{way.partition('-')[2]}", "-np", str(size), *line], {})]
    if way in ("workers", "servers"):
        servers = [("chief", 0), ("ps", 0)] if way == "servers" else []
        roles = [*servers, *(("worker", index) for index in range(size))]
        cluster: dict[str, list[str]] = {}
        with contextlib.ExitStack() as stack:  # All are open at once, so no port comes twice.
            for role, _ in roles:
                port = stack.enter_context(socket.create_server(("127.0.0.1", 0))).getsockname()[1]
                cluster.setdefault(role, []).append(f"127.0.0.1:{port}")
        tasks = [{"cluster": cluster, "task": {"type": role, "index": index}} for role, index in roles]
        return [(line, {"TF_CONFIG": json.dumps(task)}) for task in tasks]
    return [(line, {process_report.JOB: f"{job} of {size}"}) for job in range(size)]


def _wait(processes: list[Popen[bytes]], awaited: list[Popen[bytes]]) -> list[int]:
    """Exit codes of the awaited processes. Ends all of them when one fails, on Ctrl-C, and when time is up."""
    deadline = time.monotonic() + SECONDS_FOR_A_RUN
    try:
        while any(process.poll() is None for process in awaited) and time.monotonic() < deadline:
            if any(process.poll() for process in processes):
                break
            time.sleep(0.05)
    finally:
        for process in processes:
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGTERM)
        for process in processes:
            try:
                process.wait(20)
            except TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
    return [process.wait() for process in awaited]
