"""Warm starts: a process that has imported TensorFlow, Keras and hvtrain, and forks for each `python` of a test.

An import of TensorFlow takes 4 to 5 CPU seconds, and the tests start some two hundred processes. `bin/python` beside
this file stands before the real one on the PATH of tests (launching.warm). It hands its arguments, variables,
working folder and open streams to this server, which forks; the fork goes on as `python ARGUMENTS` would: own process,
own random state, own exit. TensorFlow has made no thread and no device before the fork.

What a fork does not share with a fresh process: its parent, its session, and its line and variables in /proc, which are
this server's. A signal to `bin/python` is passed on, and its end by SIGKILL ends the fork. Tests of starts, of signals
to single ranks and of what is imported when ask for `launching.start(..., cold=True)`.

argv[1]: path of the socket. Ends when its standard input is closed, which is when the tests end.
"""

import array
import contextlib
import gc
import json
import os
import random
import resource
import runpy
import selectors
import signal
import socket
import sys
from pathlib import Path
from typing import Any


def import_what_runs_need() -> None:
    os.environ.update(
        TF_CPP_MIN_LOG_LEVEL="3",
        # OpenBLAS and pyarrow's jemalloc would start threads.
        OPENBLAS_NUM_THREADS="1",
        JE_ARROW_MALLOC_CONF="background_thread:false",
    )
    from hvtrain.system import console

    with console.quiet_import(verbose=False):
        import keras  # noqa: F401
    import h5py  # noqa: F401
    import horovod.tensorflow  # noqa: F401
    import hydra  # noqa: F401
    import jinja2  # noqa: F401
    import matplotlib.backends.backend_agg
    import matplotlib.figure  # noqa: F401
    import safetensors.numpy  # noqa: F401
    import sklearn.preprocessing  # noqa: F401

    import hvtrain.config.compose
    import hvtrain.keras
    import hvtrain.runner
    import hvtrain.strategies.horovod  # noqa: F401

    convert_steps()

    threads = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
    assert len(threads) == 1, f"a fork has none of these threads but the one that forks: {threads}"


def convert_steps() -> None:
    """AutoGraph's conversion of what every training traces: half a CPU second, whose results the forks inherit."""
    from keras.src.backend.tensorflow.trainer import TensorFlowTrainer
    from tensorflow.python.autograph.core import converter
    from tensorflow.python.autograph.impl import api

    from hvtrain.keras.hooks import Distributed
    from hvtrain.keras.reduction import Reducer
    from hvtrain.step import joint_loss

    called = [
        Distributed.apply_gradients,
        Distributed.scale_loss,
        Reducer.scale_loss,
        joint_loss.ExactLoss.update_state,
        joint_loss.overridden_steps,
    ]
    # The first is what `tf.function` gets, the others are what it calls. AutoGraph's cache has each by this option.
    for function in (TensorFlowTrainer.train_step, *called):
        options = converter.ConversionOptions(
            recursive=True, user_requested=function not in called, optional_features=None
        )
        api._TRANSPILER.transform(function, converter.ProgramContext(options=options))


class Server:
    """Takes requests and tells their senders how the forks ended. `job` is set in a fork."""

    def __init__(self, path: str) -> None:
        self.job: dict[str, Any] | None = None
        self._forks: dict[int, socket.socket] = {}
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(path)
        self._listener.listen(64)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ, self._take)
        self._selector.register(0, selectors.EVENT_READ, None)
        # A child's end wakes the selector.
        self._wakes, wake = socket.socketpair()
        self._wakes.setblocking(False)
        wake.setblocking(False)
        self._wake = wake
        signal.set_wakeup_fd(wake.fileno())
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        self._selector.register(self._wakes, selectors.EVENT_READ, self._reap)

    def serve(self) -> None:
        """Returns in each fork, with its job; in the server, when the tests have ended."""
        while True:
            for key, _ in self._selector.select():
                if key.data is None:
                    for process in self._forks:
                        os.kill(process, signal.SIGKILL)
                    return
                key.data(key.fileobj)
                if self.job is not None:
                    return

    def _take(self, listener: socket.socket) -> None:
        sender, _ = listener.accept()
        try:
            job, streams = receive(sender)
        except (OSError, ValueError):
            sender.close()
            return
        process = os.fork()
        if process:
            for stream in streams:
                os.close(stream)
            self._forks[process] = sender
            self._selector.register(sender, selectors.EVENT_READ, self._hear)
            return
        self._become(job, streams)

    def _become(self, job: dict[str, Any], streams: list[int]) -> None:
        """Gives the fork what it would have as a fresh process."""
        os.setsid()
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        for kept in (self._listener, self._wakes, self._wake, *self._forks.values()):
            kept.close()
        self._selector.close()
        for target, stream in enumerate(streams):
            os.dup2(stream, target)
            os.close(stream)
        self.job = job

    def _hear(self, sender: socket.socket) -> None:
        """A signal to pass on; or the sender is gone, and its process goes with it."""
        process = next(number for number, other in self._forks.items() if other is sender)
        message = sender.recv(64)
        if not message:
            self._selector.unregister(sender)
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
            return
        for pid in message.split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, int(pid))

    def _reap(self, wakes: socket.socket) -> None:
        with contextlib.suppress(BlockingIOError):
            wakes.recv(4096)
        while self._forks:
            process, status = os.waitpid(-1, os.WNOHANG)
            if not process:
                return
            sender = self._forks.pop(process)
            with contextlib.suppress(KeyError, ValueError):
                self._selector.unregister(sender)
            with contextlib.suppress(OSError):
                sender.sendall(f"{os.waitstatus_to_exitcode(status)}\n".encode())
            sender.close()


def receive(sender: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """A request: its length in 8 bytes with three open streams, then that much JSON."""
    head, ancillary, _, _ = sender.recvmsg(8, socket.CMSG_SPACE(3 * array.array("i").itemsize))
    streams = array.array("i")
    for _, _, data in ancillary:
        streams.frombytes(data)
    parts, left = [], int.from_bytes(head, "big")
    while left:
        part = sender.recv(min(left, 1 << 20))
        if not part:
            raise ValueError("the request is cut off")
        parts.append(part)
        left -= len(part)
    return json.loads(b"".join(parts)), list(streams)


def prepare(job: dict[str, Any]) -> None:
    """Sets variables, folder, paths and random state as Python does at its start."""
    import faulthandler

    import numpy as np

    os.environ.clear()
    os.environ.update(job["environ"])
    os.chdir(job["cwd"])
    os.umask(job["umask"])
    os.sched_setaffinity(0, job["affinity"])
    for number, limits in job["limits"].items():
        if tuple(limits) != resource.getrlimit(int(number)):
            resource.setrlimit(int(number), tuple(limits))
    extra = [
        str(Path(part).resolve())
        for part in job["environ"].get("PYTHONPATH", "").split(os.pathsep)
        if part
    ]
    sys.path[:] = [*extra, *BASE_PATH]
    sys.executable = job["executable"]  # What the fork starts with it is a fork too.
    sys.orig_argv = [sys.executable, *job["argv"]]
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in job["ignored"]:
        signal.signal(number, signal.SIG_IGN)
    if job["environ"].get("PYTHONFAULTHANDLER"):
        faulthandler.enable()
    random.seed()
    np.random.seed()
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        stream = os.fdopen(number, "w" if number else "r", closefd=False)
        if number:
            stream.reconfigure(line_buffering=True)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def run(arguments: list[str]) -> None:
    """`python WORDS`: -m MODULE, -c CODE or a script."""
    if arguments[0] == "-m":
        sys.argv = arguments[1:]
        sys.path.insert(0, str(Path.cwd()))
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    elif arguments[0] == "-c":
        sys.argv = ["-c", *arguments[2:]]
        sys.path.insert(0, "")
        exec(compile(arguments[1], "<string>", "exec"), sys.modules["__main__"].__dict__)
    else:
        sys.argv = arguments
        sys.path.insert(0, str(Path(arguments[0]).resolve().parent))
        runpy.run_path(arguments[0], run_name="__main__")


if __name__ == "__main__":
    BASE_PATH = sys.path[1:]
    import_what_runs_need()
    gc.collect()
    gc.freeze()  # What has been imported lives until the end, so no fork has to look at it or copy it.
    server = Server(sys.argv[1])
    server.serve()
    if server.job is not None:
        job = server.job
        del server
        prepare(job)
        run(job["argv"])
