"""Runs with parameter servers: what equals one process, what is counted, what is refused, and what a loss ends."""

import json
import os
import re
import signal
import socket
import time

import numpy as np
import psutil
import pytest
import yaml
from safetensors.numpy import load_file

from hvtrain.launch.cluster_files import texts
from hvtrain.launch.job import Job
from hvtrain.launch.kubernetes import JobSet
from hvtrain.system.run_files import read_starts
from lab import Lab, needs_lab
from launching import finish, kill, many_runs, run, start
from tiers import with_nightly, with_release

pytestmark = pytest.mark.distributed
nightly, release = pytest.mark.nightly, pytest.mark.release

SYNC, ASYNC = "strategy=parameter_server_sync", "strategy=parameter_server"
STEPS = [
    "train.batch_size=8",
    "checkpoint.keep=9",
    "train.steps=20",
    "optimizer=momentum",
    "optimizer.learning_rate=0.05",
]
SUM = "+task.loss.reduction=sum"
RUNS = {
    "exact": [SYNC, *STEPS],
    "joint": ["strategy=single", *STEPS],
    "half": [SYNC, *STEPS, "strategy.replicas_to_aggregate=1"],
    "async": [ASYNC, *STEPS, "train.steps=21", "train.rates={dense: 1e-9}"],
    "no": [ASYNC, *STEPS, "data.uneven=pad"],
    "no/mask": [SYNC, *STEPS, "model.kind=language", "dataset.kind=language", "task=language"],
}
# By default the runs above hold that servers compute as one process does, and that all steps count.
NIGHTLY_RUNS = {
    "no/accumulate": [SYNC, *STEPS, "train.accumulate=2", "train.steps=null"],
    "no/float16": [ASYNC, *STEPS, "train.precision=mixed_float16"],
    "no/xla": [ASYNC, *STEPS, "train.jit_compile=true"],
    "exact/on": [SYNC, *STEPS, "train.steps=30"],
    "unlike": [SYNC, *STEPS, "train.batch_size=[12,4]"],
    "joint unlike": ["strategy=single", *STEPS, "train.batch_size=[12,4]"],
    "to servers": ["strategy=single", *STEPS, "train.steps=10"],
    "to servers/on": [SYNC, *STEPS],
    "from servers": [SYNC, *STEPS, "train.steps=10"],
    "from servers/on": ["strategy=single", *STEPS],
}
# Synchronous servers have other batches and another strategy nightly.
RELEASE_RUNS = {
    "sum": [SYNC, *STEPS, "train.batch_size=[12,4]", SUM],
    "joint sum": ["strategy=single", *STEPS, "train.batch_size=[12,4]", SUM],
    "to async": ["strategy=single", *STEPS, "train.steps=10"],
    "to async/on": [ASYNC, *STEPS],
    "from async": [ASYNC, *STEPS, "train.steps=10", "train.divide_steps_by_size=false"],
    "from async/on": ["strategy=single", *STEPS, "train.divide_steps_by_size=false"],
}


# Nightly it takes more than a minute: each run starts its strategy's servers and workers anew, on four processes.
@pytest.fixture(scope="module")
def runs(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("servers")
    nightly_too = NIGHTLY_RUNS if with_nightly(request) else {}
    release_too = RELEASE_RUNS if with_release(request) else {}
    settings = {**RUNS, **nightly_too, **release_too}
    return folder, many_runs("mpi", 4, settings, folder, timeout=900, worker="server_runs.py")[0]


def arrays(folder, step):
    state = load_file(folder / "checkpoints" / f"step-{step:08d}" / "state.safetensors")
    return {name: array for name, array in state.items() if not name.startswith("rank/")}


def difference(folder, run_name, other_name, step=20):
    first, second = arrays(folder / run_name, step), arrays(folder / other_name, step)
    assert first.keys() == second.keys() and len(first) > 10
    return max(
        np.abs(first[name].astype(float) - second[name]).max()
        for name in first
        if name.startswith("model/")
    )


def test_synchronous_steps_equal_one_process_on_the_joint_batch(runs):
    """Weights, with an embedding; and a mean over fewer workers does not."""
    folder, results = runs
    assert results["exact"]["record"]["num_steps"] == 20, results["exact"]
    assert difference(folder, "exact", "joint") < 1e-5
    assert difference(folder, "half", "joint") > 1e-3
    assert results["exact"]["record"]["proof"]["steps_by_worker"] == [20, 20]
    for name, batch in {"exact": "2 x 8 = 16", "async": "1 x 8 = 8"}.items():
        described = read_starts(folder / name)[0]["described"]
        assert described["global batch"] == f"{batch} (workers in a step x batch)"
    assert any(
        "an embedding's row are summed" in line
        for line in results["exact"]["record"]["differences"]
    )
    ours, expected = (results[name]["record"]["metrics"] for name in ("exact", "joint"))
    assert ours == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize(
    "name", [pytest.param("unlike", marks=nightly), pytest.param("sum", marks=release)]
)
def test_workers_with_unlike_batches_equal_one_process_on_the_joint_batch(runs, name):
    folder, results = runs
    assert results[name]["parts"] == [12, 4], results[name]
    assert difference(folder, name, f"joint {name}") < 1e-5


def test_asynchronous_steps_are_all_counted(runs):
    folder, results = runs
    record = results["async"]["record"]
    assert record["num_steps"] == 21
    by_worker = record["proof"]["steps_by_worker"]
    assert sum(by_worker) == 21 and min(by_worker) > 0, "both worked"
    assert (
        record["split"]["communication_seconds"] is None and record["split"]["efficiency"] is None
    )
    assert (record["num_ranks"], record["num_replicas"]) == (1, 2)
    state = arrays(folder / "async", 21)
    (iterations,) = [array for name, array in state.items() if name.endswith("iteration")]
    assert iterations == 21
    assert record["proof"]["examples_each_epoch"] == [56] * 3, "7 batches of 8"
    assert record["examples_per_second"] > 0 and record["step_seconds"] > 0 and record["split"]
    assert any("stale" in line for line in record["differences"])


def test_rates_of_parts_hold_on_the_servers(runs):
    """Layers with a rate of almost 0 stay as they were, and others do not."""
    folder, _ = runs
    first = load_file(sorted((folder / "async" / "checkpoints").iterdir())[0] / "state.safetensors")
    last = arrays(folder / "async", 21)
    moved = {
        name: np.abs(first[name] - last[name]).max() > 1e-6
        for name in last
        if name.startswith("model/")
    }
    assert {moved[name] for name in moved if "embedding" in name} == {True}
    assert {moved[name] for name in moved if "dense/" in name} == {False}


@nightly
def test_a_run_resumes(runs):
    folder, results = runs
    record = results["exact/on"]["record"]
    assert (record["first_step"], record["num_steps"]) == (20, 30)
    assert [
        int(a) for name, a in arrays(folder / "exact", 30).items() if name.endswith("iteration")
    ] == [30]


@nightly
@pytest.mark.parametrize("name", ["to servers", "from servers"])
def test_a_run_goes_on_under_another_strategy_as_if_it_were_its_own(runs, name):
    folder, results = runs
    record = results[f"{name}/on"].get("record") or pytest.fail(results[f"{name}/on"]["error"])
    assert (record["first_step"], record["num_steps"]) == (10, 20)
    assert difference(folder, name, "joint") < 1e-5


@release
@pytest.mark.parametrize("name", ["to async", "from async"])
def test_an_asynchronous_run_goes_on_from_and_to_another_strategy(runs, name):
    _, results = runs
    record = results[f"{name}/on"].get("record") or pytest.fail(results[f"{name}/on"]["error"])
    assert record["first_step"] == 10 and record["num_steps"] >= 20


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "no",
            "strategy=parameter_server needs batches of one size in all steps; choose data.uneven=trim",
        ),
        (
            "no/mask",
            "strategy=parameter_server_sync averages the workers' gradients, but this loss divides by a",
        ),
        pytest.param(
            "no/accumulate",
            "strategy=parameter_server_sync and train.accumulate exclude each other",
            marks=nightly,
        ),
        pytest.param(
            "no/float16",
            "strategy=parameter_server and train.precision=mixed_float16 exclude each other",
            marks=nightly,
        ),
        pytest.param(
            "no/xla",
            "strategy=parameter_server and train.jit_compile exclude each other",
            marks=nightly,
        ),
    ],
)
def test_what_servers_cannot_do_is_refused(runs, name, message):
    assert f"ConfigError: {message}" in runs[1][name].get("error", "no error")


def test_too_few_processes(tmp_path):
    code, output = run(None, 1, "python", "-m", "hvtrain", ASYNC, "run.dir=none", cwd=tmp_path)
    assert code == 2
    assert (
        "strategy=parameter_server needs 3 processes or more (a coordinator, 1 ps and a worker)"
        in output
    )


def begin(folder, num_processes, *settings, **more):
    """A run that has written a checkpoint, and its processes' numbers by rank."""
    process = start(
        "mpi",
        num_processes,
        "python",
        "-m",
        "hvtrain",
        "model=mlp",
        "run.report=false",
        f"run.dir={folder}/run",
        *settings,
        cwd=folder,
    )
    deadline = time.monotonic() + 240
    while (
        not list(folder.glob("run/checkpoints/step-*"))
        and time.monotonic() < deadline
        and process.poll() is None
    ):
        time.sleep(0.2)
    return process, ranks_of(folder)


def ranks_of(folder):
    """Numbers of the run's processes, by rank."""
    pids = {}
    for process in psutil.process_iter(["cmdline", "environ"]):
        rank = (process.info["environ"] or {}).get("OMPI_COMM_WORLD_RANK")
        if rank and f"run.dir={folder}/run" in (process.info["cmdline"] or ()):
            pids.setdefault(int(rank), process.pid)  # Not what the rank has just forked.
    return pids


@pytest.mark.parametrize(
    ("rank", "role"),
    [
        pytest.param(3, "worker 1", marks=release),
        pytest.param(1, "ps 0", marks=nightly),
    ],
)
def test_a_process_that_is_killed_ends_the_run(tmp_path, rank, role):
    process, ranks = begin(tmp_path, 4, ASYNC, "train.epochs=5000")
    os.kill(ranks[rank], signal.SIGKILL)
    output = finish(process, timeout=60)
    assert process.returncode == 75, output
    # Open MPI kills the others a second later; on a busy machine they cannot say why before it.
    by_watchdog = f"({role}) is gone (killed, or its host is lost)" in output
    assert by_watchdog or (f"rank {rank} host" in output and "killed by SIGKILL" in output), output
    assert "to resume from " in output
    assert not ranks_of(tmp_path)


@pytest.mark.parametrize(
    ("job", "number", "code"),
    [
        pytest.param("worker", signal.SIGINT, 130, marks=nightly),
        pytest.param("ps", signal.SIGTERM, 75, marks=release),
    ],
)
def test_a_signal_to_one_of_the_processes_started_by_hand_saves_and_stops_all(
    tmp_path, job, number, code
):
    with socket.create_server(("127.0.0.1", 0)) as free:
        meet = f"127.0.0.1:{free.getsockname()[1]}"
    line = [
        "python",
        "-m",
        "hvtrain",
        "launch",
        "-np",
        "1",
        "--num-ps",
        "1",
        "--coordinator",
        meet,
        "--task-index",
        "0",
    ]
    settings = ["--", ASYNC, "model=mlp", "train.epochs=5000", f"run.dir={tmp_path}/run"]
    jobs = ("coordinator", "ps", "worker")
    processes = {
        name: start(None, 1, *line, "--job-name", name, *settings, cwd=tmp_path) for name in jobs
    }
    deadline = time.monotonic() + 240
    while not list(tmp_path.glob("run/checkpoints/step-*")) and time.monotonic() < deadline:
        time.sleep(0.2)
    processes[job].send_signal(number)
    outputs = {name: finish(process, timeout=60) for name, process in processes.items()}
    assert {name: process.returncode for name, process in processes.items()} == {
        "coordinator": code,
        "ps": 0,
        "worker": 0,
    }
    name = "Ctrl-C" if number == signal.SIGINT else "SIGTERM"
    assert f"stopped by {name}" in outputs["coordinator"]
    assert outputs[job].count("\n") == 1, "where it waits for the others, and nothing more"


@nightly
def test_a_late_gradient_is_dropped(tmp_path):
    """One of three workers stands still for a while; the run goes on without it, and drops what it then gives."""
    process, ranks = begin(tmp_path, 5, SYNC, "strategy.replicas_to_aggregate=2", "train.epochs=30")
    try:
        os.kill(ranks[4], signal.SIGSTOP)
        time.sleep(1)
        before = max(tmp_path.glob("run/checkpoints/step-*"))
        deadline = time.monotonic() + 60
        while (
            max(tmp_path.glob("run/checkpoints/step-*")) == before and time.monotonic() < deadline
        ):
            time.sleep(0.2)
        assert max(tmp_path.glob("run/checkpoints/step-*")) > before, "it did not wait"
        os.kill(ranks[4], signal.SIGCONT)
        output = finish(process)
    finally:
        if process.poll() is None:
            kill(process)
    assert process.returncode == 0, output
    record = json.loads((tmp_path / "run" / "result.json").read_text())
    assert any(line.startswith("dropped ") for line in record["differences"]), record["differences"]


@release
def test_digits(tmp_path):
    code, output = run(
        "gloo", 4, "python", "-m", "hvtrain", ASYNC, f"run.dir={tmp_path}/run", cwd=tmp_path
    )
    assert code == 0, output
    assert_learned(tmp_path)


@nightly
def test_the_pods_of_a_jobset_learn_the_digits(tmp_path):
    """Each process as its pod starts it, by its name and index, from the file for Kubernetes."""
    job = Job(("python", "-m", "hvtrain", SYNC, f"run.dir={tmp_path}/run"), 2, num_ps=1)
    (text,) = texts(JobSet(image="hvtrain"), job).values()
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    # What differs between pods and processes of one host: the name of rank 0's, and its port.
    text = text.replace("hvtrain-coordinator-0-0.hvtrain:2222", f"localhost:{port}")
    text = text.replace("hvtrain-coordinator-0-0.hvtrain", "localhost").replace("$$", "$")
    processes = []
    for entry in yaml.safe_load(text)["spec"]["replicatedJobs"]:
        (container,) = entry["template"]["spec"]["template"]["spec"]["containers"]
        for index in range(entry["template"]["spec"]["completions"]):
            line = [
                argument.replace("$(JOB_COMPLETION_INDEX)", str(index))
                for argument in container["args"]
            ]
            processes.append(start(None, 1, *line, cwd=tmp_path))
    outputs = [finish(process) for process in processes]
    assert [process.returncode for process in processes] == [0] * 4, outputs
    assert_learned(tmp_path)


def assert_learned(folder):
    record = json.loads((folder / "run" / "result.json").read_text())
    assert record["test_accuracy"] > 0.95
    assert (folder / "run" / "model.keras").exists() and (folder / "run" / "history.csv").exists()


@release
@needs_lab
def test_roles_on_two_hosts_find_each_other():
    line = ["-np", "2", "--num-ps", "1", "-H", "s1,s2", "--", "model=mlp", "train.epochs=1"]
    with Lab(2) as lab:
        for strategy in (SYNC, ASYNC):
            code, output = lab.launch(
                *line, strategy, f"run.dir={lab.home}/{strategy.partition('=')[2]}"
            )
            assert code == 0, output
            devices = "0 s1 CPU (coordinator 0), 1 s1 CPU (ps 0), 2 s1 CPU (worker 0), 3 s2 CPU (worker 1)"
            assert re.search(f"^devices +{re.escape(devices)}$", output, re.MULTILINE)
            assert "1,408 of 1,437 samples seen once per epoch" in output
