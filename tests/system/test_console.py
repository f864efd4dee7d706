"""What a process knows of the launcher that may have started it, and signals while it starts another."""

import os
import shlex
import signal
import subprocess
import sys
from contextlib import suppress

import psutil
import pytest

from hvtrain.launch.child import started
from hvtrain.system import console


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, False),
        ({"SLURM_PROCID": "0"}, False),
        ({"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2"}, True),
        ({"OMPI_COMM_WORLD_SIZE": "1"}, True),
    ],
    ids=["alone", "Slurm's batch script", "srun", "mpirun"],
)
def test_a_process_knows_whether_it_is_one_of_a_launchers(monkeypatch, variables, expected):
    """A batch script of Slurm has a rank too, and its commands are no ranks: export and generate refused them."""
    for name in ("SLURM_PROCID", *console.SIZE_VARIABLES):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert console.is_launched() == expected


@pytest.mark.parametrize(
    ("redirect", "shown"),
    [("2>/dev/full", ""), (">/dev/full", "hvtrain: the output cannot be written: No space left")],
)
def test_a_full_disk_hides_neither_the_exit_code_nor_that_a_result_is_lost(redirect, shown):
    """Schedulers go by the code: 75 for a run that was only interrupted."""
    program = (
        "from hvtrain.system.command import enter\n"
        "from hvtrain.errors import BusyError\n"
        "def work():\n"
        "    print('the result')\n"
        f"    if {not shown}: raise BusyError('another run is using it')\n"
        "    return 0\n"
        "enter(work)\n"
    )
    command = f"{shlex.quote(sys.executable)} -c {shlex.quote(program)} {redirect}"
    environment = {**os.environ, "PYTHONUNBUFFERED": ""}
    ended = subprocess.run(
        command, env=environment, shell=True, capture_output=True, text=True, timeout=60
    )
    assert ended.returncode == (2 if shown else 75), ended.stderr
    assert ended.stderr.startswith(shown) and "Traceback" not in ended.stderr


def test_a_ctrl_c_while_a_process_is_started_ends_that_process_and_is_not_lost(tmp_path):
    """Python prints what a handler raises within its hooks around a fork, and goes on."""
    pending = [signal.SIGINT]
    os.register_at_fork(after_in_parent=lambda: pending and signal.raise_signal(pending.pop()))
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt), started(["sleep", "100"], tmp_path / "log"):
            pytest.fail("it went on")
    finally:
        signal.signal(signal.SIGINT, before)
    assert not [
        child for child in psutil.Process().children() if _line_of(child) == ["sleep", "100"]
    ]


def _line_of(process):
    """Its words; none if it has just ended."""
    with suppress(psutil.Error):
        return process.cmdline()
