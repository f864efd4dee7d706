"""Notebooks in a real kernel, whose cells start real ranks."""

import importlib.util
import signal
import threading
import time
from contextlib import suppress

import psutil
import pytest

import hvtrain
from hvtrain.errors import ConfigError
from hvtrain.launch.notebook import FUNCTION_FILE, rank_main, write_object
from kernel import execute, notebook, text_of

needs_kernel = pytest.mark.skipif(
    not all(map(importlib.util.find_spec, ("ipykernel", "nbclient"))),
    reason="ipykernel and nbclient (scripts/lock/notebook.txt) are missing",
)

TASK = """
import sys
import hvtrain

def task(more, *, name):
    import hvtrain.keras as hvd
    import tensorflow as tf

    @tf.function
    def doubled(x):
        if x > 0:  # AutoGraph needs the cell's text.
            return 2 * x
        return x

    hvd.init()
    print("here is", name, hvd.rank())
    return hvd.rank(), float(hvd.allreduce(doubled(tf.constant(hvd.rank() + more)), op=hvd.Sum))
"""
CALL = (
    "hvtrain.run_ranks(2, task, 1.0, name='rank', hosts='localhost:2'), 'tensorflow' in sys.modules"
)
FAILING = """%%ranks 2
import hvtrain.keras as hvd
hvd.init()
print("cell on", hvd.rank(), "task" in globals())
hvd.allreduce(1.0)
if hvd.rank() == 1:
    raise ValueError("too few examples")
hvd.allreduce(1.0)
"""


@needs_kernel
@pytest.mark.distributed
@pytest.mark.nightly
def test_a_notebook_on_two_ranks(tmp_path):
    wrong = ["%%ranks two\nprint()", "%%ranks 2\nprint(", "hvtrain.run_ranks(0, print)"]
    client = notebook(
        ["%load_ext hvtrain", TASK, CALL, FAILING, *wrong], tmp_path, allow_errors=True
    )
    _, _, called, failing, *refused = (text_of(cell) for cell in execute(client).cells)
    assert "([(0, 6.0), (1, 6.0)], False)" in called, called
    assert (
        "here is rank 0" in called and "here is rank 1" not in called and "AutoGraph" not in called
    ), called
    assert "\ncell on 0 False" in f"\n{failing}", failing
    cause = "RankError: rank 1 host localhost: ValueError: too few examples (%%ranks cell, line 6); see its traceback"
    assert cause in failing and '    raise ValueError("too few examples")' in failing, failing
    first, second = sorted((tmp_path / "launch").iterdir())
    assert f"what each rank said is in {second}" in failing
    assert "here is rank 1" in (first / "rank-0001-localhost.log").read_text()
    assert not list(tmp_path.rglob("*.pickle")), "what was sent is gone"
    needed = (
        "write %%ranks 2, or %%ranks 4",
        "SyntaxError",
        "argument -np: 0 is not a whole number of at least 1",
    )
    assert all(part in text for part, text in zip(needed, refused)), refused


WAITING = """
def task():
    import time
    import hvtrain.keras as hvd
    hvd.init()
    hvd.allreduce(1.0)
    print("they wait")
    if hvd.rank() == 1:
        time.sleep(600)
    hvd.allreduce(1.0)

import hvtrain
import sys
hvtrain.run_ranks(2, task)
"""


@needs_kernel
@pytest.mark.distributed
@pytest.mark.parametrize(
    "way",
    [
        pytest.param("interrupt", marks=pytest.mark.nightly),
        pytest.param("shutdown", marks=pytest.mark.release),
        pytest.param("kill", marks=pytest.mark.nightly),
    ],
)
def test_no_rank_outlives_its_cell(way, tmp_path):
    """One rank sleeps, and the other waits for it inside Horovod."""
    client = notebook([WAITING, "hvtrain.run_ranks(2, sys.exit, 0)"], tmp_path, allow_errors=True)
    start(client)
    wait_until(
        lambda: "they wait" in text_of(client.nb.cells[0]), "rank 0's output is shown while it runs"
    )
    assert len(ranks_below(tmp_path)) == 2
    if way == "interrupt":
        client.km.interrupt_kernel()
        outputs = client.nb.cells[0].outputs
        wait_until(lambda: outputs[-1].get("ename") == "KeyboardInterrupt", "the kernel says so")
        assert not ranks_below(tmp_path), "and by then they are gone"
        # The traceback quotes docstrings, which may say "failed" themselves.
        printed = "".join(output.get("text", "") for output in outputs)
        assert "failed" not in printed, printed
        wait_until(
            lambda: (
                "rank 0 ended without an error before the function returned"
                in text_of(client.nb.cells[1])
            ),
            "next",
        )
    elif way == "shutdown":
        client.km.shutdown_kernel()
    else:
        client.km.signal_kernel(signal.SIGKILL)
    wait_until(lambda: not ranks_below(tmp_path), "all ranks end")


def start(client):
    """Runs the notebook in a thread, which does not always end when its kernel does."""

    def work():
        with suppress(Exception):
            execute(client)

    threading.Thread(target=work, daemon=True).start()


def wait_until(is_so, what):
    deadline = time.monotonic() + 100
    while not is_so():
        assert time.monotonic() < deadline, what
        time.sleep(0.1)


def ranks_below(folder):
    """Processes of ranks whose launch is in that folder."""
    lines = (process.info["cmdline"] or [] for process in psutil.process_iter(["cmdline"]))
    return [
        line
        for line in lines
        if line[1:3] == ["-m", "hvtrain.launch.notebook"] and str(folder) in line[3]
    ]


def test_what_cannot_be_sent(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    lock = threading.Lock()
    with pytest.raises(
        ConfigError,
        match=r"^the function or one of its arguments cannot be sent .* \(TypeError: .*lock.*\); send numbers",
    ):
        hvtrain.run_ranks(2, lambda: lock)
    (tmp_path / "launch").rename(tmp_path / "kept")
    (tmp_path / "launch").write_text("")
    with pytest.raises(
        ConfigError, match=r"launch cannot be written: File exists; start the notebook in a folder"
    ):
        hvtrain.run_ranks(2, print)


def test_what_a_rank_refuses(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", ["notebook", str(tmp_path)])
    with pytest.raises(
        ConfigError, match=r"is not on \S+; work in a folder that all hosts have at the same path"
    ):
        rank_main()
    path = tmp_path / FUNCTION_FILE
    write_object(path, (threading.Lock, (), {}, {}), "the function")
    assert path.stat().st_mode & 0o777 == 0o600
    with pytest.raises(
        ConfigError,
        match=r"^the function's return value of type lock cannot be sent to another process",
    ):
        rank_main()
    path.chmod(0o666)
    with pytest.raises(
        ConfigError,
        match=r"is not a file that only this user can write; work in a folder of your own",
    ):
        rank_main()
