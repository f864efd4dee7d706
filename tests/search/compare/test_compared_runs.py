"""Real comparisons on two ranks. No time is asserted."""

import json
import os
import signal
import sys
import time

import pytest

from in_process import run_command
from launching import finish, run, start
from ranks import MARK, rank_processes, wait_until_gone

pytestmark = pytest.mark.distributed

# Fresh processes, not forks of the warm server: it measures the memory of the processes that it starts.
COMPARE = [sys.executable, "-m", "hvtrain", "compare", "-np", "2", "--plan", "4"]
RUN = [
    "model=mlp",
    "model.hidden=[8]",
    "train.epochs=2",
    "dataset.num_validation=100",
    "schedule.warmup_epochs=0",
]


@pytest.mark.nightly
def test_single_and_horovod_and_one_that_fails(tmp_path):
    """One that fails costs its own runs, not the comparison."""
    strategies = "strategy=single,horovod,horovod@compression=int4"
    arguments = [
        strategies,
        *RUN,
        "--rounds",
        "1",
        "--speed-steps",
        "20",
        "--output",
        str(tmp_path / "out"),
    ]
    code, output = run(None, 1, *COMPARE, *arguments, cwd=tmp_path, timeout=580)
    assert code == 1, output
    assert {"compare.html", "compare.json", "compare.png"} <= {
        path.name for path in (tmp_path / "out").iterdir()
    }
    comparison = json.loads((tmp_path / "out" / "compare.json").read_text())
    single, horovod, failing = comparison["strategies"]
    assert (
        "strategy.compression=int4 is not one of none, fp16, bf16, int8, powersgd (exit code 2)"
        in failing["error"]
    )
    assert failing["error"] in output and "failed" in next(
        x for x in output.splitlines() if x.startswith(failing["name"])
    )
    assert failing["rounds"] == failing["curve"] == [], "it is not tried again"
    for entry in (single, horovod):
        assert (
            entry["error"] is None and entry["examples_per_second"] > 0 and entry["cpu_seconds"] > 0
        )
        assert entry["global_batch"] == 64 and entry["num_steps"] == 2 * (1337 // 64), (
            "the same training"
        )
        assert [point["examples"] for point in entry["curve"]] == [
            1280,
            2560,
        ] and "test_accuracy" in entry["tests"]
        assert not (tmp_path / "out" / "round-1" / entry["name"] / "run" / "checkpoints").exists()
    assert horovod["peak_bytes"] > 1.5 * single["peak_bytes"] > 1e8, "two processes"
    assert abs(single["curve"][0]["loss"] - horovod["curve"][0]["loss"]) < 0.3, (
        "weights of one seed, the same steps"
    )
    assert (
        comparison["target"]["metric"] == "val_accuracy"
        and single["target_seconds"]
        and horovod["target_seconds"]
    )
    planned, line = comparison["conclusion"][-2:]
    assert planned.startswith("Planned for more ranks: horovod") and "4 ranks are" in planned
    assert (
        line.endswith(" strategy=horovod")
        and "hvtrain plan -np 4 --ranks-per-host 2 --step-seconds 0.0" in line
    )
    assert horovod["differences"] == [] and comparison["conclusion"][0] in output


@pytest.mark.nightly
def test_ctrl_c_writes_what_was_measured(tmp_path):
    arguments = [
        "strategy=single,horovod",
        *RUN,
        "--rounds",
        "3",
        "--speed-steps",
        "20",
        "--output",
        str(tmp_path / "out"),
    ]
    process = start(None, 1, "python", *COMPARE[1:], *arguments, cwd=tmp_path)
    lines = iter(process.stdout.readline, "")
    seen = [next(line for line in lines if line.startswith("run 1 of 8: single"))]
    os.kill(process.pid, signal.SIGINT)
    output = "".join([*seen, finish(process)])
    assert process.returncode == 130 and "the results so far have been saved" in output, output
    comparison = json.loads((tmp_path / "out" / "compare.json").read_text())
    assert comparison["interrupted"] and len(comparison["strategies"][0]["rounds"]) == 1
    assert "interrupted" in (tmp_path / "out" / "compare.html").read_text()


@pytest.mark.nightly
def test_its_ranks_end_with_it(tmp_path):
    """Also if it is killed. The run saves and stops, as after SIGTERM to its launcher."""
    out, mark = tmp_path / "out", f"{tmp_path}"
    arguments = [
        "strategy=horovod,multi_worker_mirrored",
        "model=mlp",
        "train.epochs=3000",
        "--output",
        str(out),
    ]
    process = start(
        None, 1, *COMPARE, *arguments, "--speed-steps", "90000", cwd=tmp_path, **{MARK: mark}
    )
    deadline = time.monotonic() + 200
    while not list(out.glob("round-1/*/run/starts.json")) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert len(rank_processes(mark)) == 2
    os.kill(process.pid, signal.SIGKILL)
    assert not wait_until_gone(mark, 90)


def test_an_output_folder_that_is_in_use_is_refused(tmp_path):
    (tmp_path / "here").write_text("")
    arguments = ["strategy=single,horovod", *RUN, "--output", str(tmp_path)]
    for command_line, message in (
        (arguments, f"--output {tmp_path} is not empty; choose another folder\n"),
        (
            [*arguments[:-1], str(tmp_path / "here")],
            f"--output {tmp_path}/here cannot be written: File exists; choose another folder\n",
        ),
        (
            [*arguments[:-2], "--target", "0.97"],
            "--target 0.97 is not a metric with a finite value; write it as val_acc",
        ),
    ):
        code, output, errors = run_command(*COMPARE[2:], *command_line, cwd=tmp_path)
        assert (code, output) == (2, "") and errors.startswith(f"hvtrain: {message}"), errors
        assert len(errors.splitlines()) == 1
