"""python -m hvtrain launch --max-restarts: what can heal is started again, from the newest checkpoint.

What is started again, and Ctrl-C in a pause, are in test_transcripts.py by default, without ranks.
"""

import hashlib
import os
import re
import subprocess
import sys

import numpy as np
import pytest
from safetensors.numpy import load_file

from hvtrain.launch import on_host, remote_hosts
from hvtrain.launch.job import Host
from hvtrain.launch.output import PlainOutput
from hvtrain.launch.remote_hosts import Ssh, capture
from hvtrain.launch.restart import choose_hosts
from hvtrain.launch.supervisor import Launch
from lab import Lab, needs_lab
from launcher_lab import fate, last_line, left, line, started, wait_for
from launching import ROOT, finish, run, start

pytestmark = pytest.mark.distributed
nightly, release = pytest.mark.nightly, pytest.mark.release

LAUNCH = [sys.executable, "-m", "hvtrain", "launch"]
STRIKES = {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests' / 'support' / 'launched'}"}
HOSTS = (Host("s1", 2), Host("s2", 2), Host("s3", 2))


@pytest.fixture(scope="module")
def lab():
    with Lab(3) as made:
        yield made


SUPERVISES = """
import os, sys
from pathlib import Path
from hvtrain.launch.output import PlainOutput
from hvtrain.launch.remote_hosts import HostCalls
from hvtrain.launch.supervisor import Launch, Signals

HostCalls(("s1",)).write(Path(sys.argv[1]))
own = Launch(sys.argv[2:], dict(os.environ), PlainOutput(), Path(sys.argv[1]), seconds_to_begin=0.3)
ending = own.run(Signals())
print(ending.code, ending.message)
"""


@pytest.mark.parametrize(
    ("variables", "seconds", "ending"),
    [
        (
            {},
            1000,
            r"75 FIRST FAILURE the launcher host \S+: no rank began within 0.3 s on s1; look at .*",
        ),
        ({"HOROVOD_RANK": "0"}, 1, "0"),
    ],
    ids=["none begins", "one has begun"],
)
def test_a_launch_of_which_no_rank_begins_in_time_is_ended(variables, seconds, ending, tmp_path):
    """MPI waits for ever for a host that lets it in and starts nothing."""
    line = [sys.executable, "-c", SUPERVISES, str(tmp_path), "sleep", str(seconds)]
    variables = {**os.environ, **variables}
    done = subprocess.run(
        line, env=variables, capture_output=True, text=True, check=False, timeout=60
    )
    assert re.fullmatch(ending, done.stdout.strip()), done


@pytest.mark.parametrize("files", [127, 128])
def test_a_login_that_may_open_too_few_files_is_refused(files, monkeypatch):
    """MPI would wait for ever there."""

    def login(self, host, command, stdin):
        """A shell on this host stands for one that ssh opens on another."""
        limited = f'ulimit -n {files}; exec "$@"'
        return capture(["bash", "-c", limited, "bash", *command], stdin, 60)

    monkeypatch.setattr(Ssh, "run", login)
    monkeypatch.setattr(remote_hosts, "is_local", lambda host: False)
    refused = remote_hosts.absent(["localhost"], Ssh())
    assert len(refused) == (files < 128), refused
    for why in refused.values():
        assert why.startswith("host localhost lets a login open 127 files, too few for MPI"), why


# As setproctitle does.
RETITLED = """
import ctypes, os, pathlib, time
begin, end = map(int, open("/proc/self/stat").read().rpartition(")")[2].split()[47:49])
if not os.environ.get("SPT_NOENV"):
    ctypes.memset(begin, 0, end - begin)
pathlib.Path(os.environ["HVTRAIN_LAUNCH"], "titled").touch()
time.sleep(60)
"""


def test_a_rank_that_sets_its_title_keeps_its_marks(tmp_path):
    """Otherwise no signal reaches it, and the launch is ended after five minutes, since none seems to have begun."""
    variables = {**os.environ, "HOROVOD_RANK": "0"}
    Launch([sys.executable, "-c", RETITLED], variables, PlainOutput(), tmp_path)
    wait_for(tmp_path / "titled")
    assert on_host.count_ranks(str(tmp_path)) == 1
    on_host.clean_up(str(tmp_path))


@pytest.mark.parametrize(
    ("ranks", "least", "failed", "absent", "expected"),
    [
        (6, 6, {}, (), ("s1 s2 s3", 6)),
        (4, 4, {"s2": 2}, (), ("s1 s3", 4)),
        (4, 4, {"s2": 1}, ("s1",), ("s2 s3", 4)),
        (6, 4, {"s2": 2}, (), ("s1 s3", 4)),
        (6, 6, {"s2": 2}, (), ("s1 s2 s3", 6)),
        (6, 2, {"s1": 2, "s2": 3}, ("s3",), ("s1 s2", 4)),
        (6, 6, {}, ("s3",), None),
        (6, 1, {}, ("s1", "s2", "s3"), None),
    ],
)
def test_the_hosts_to_go_on_with(ranks, least, failed, absent, expected):
    """A bad host is left out where the others are enough, an absent one always."""
    hosts = choose_hosts(HOSTS, ranks, least, failed, absent)
    assert (hosts and (" ".join(host.name for host in hosts[0]), hosts[1])) == expected


@needs_lab
@pytest.mark.parametrize("how", ["launch-gloo", pytest.param("launch-mpi", marks=release)])
def test_a_killed_rank_is_started_again(lab, tmp_path, how):
    """Each attempt ends with what ended it, and has its own log of each rank."""
    (tmp_path / "ranks").mkdir()
    options = ("--max-restarts", "2", "--logs", str(tmp_path / "logs"))
    command = line(
        how, "s1:1,s2:1", *fate(tmp_path / "ranks", "SIGKILL-once", "1"), options=options
    )
    code, output = lab.run("s1", *command)
    assert code == 0, output
    messages = [text for text in output.splitlines() if text.startswith("hvtrain: ")]
    assert re.match("hvtrain: FIRST FAILURE rank 1 host s2: killed by SIGKILL", messages[1]), output
    assert messages[2:] == [
        "hvtrain: restart 1 of 2 in 1 s, from the newest checkpoint, on s1:1,s2:1"
    ], output
    logs = sorted(
        str(path.relative_to(tmp_path / "logs")) for path in (tmp_path / "logs").rglob("*.log")
    )
    names = ("rank-0000-s1.log", "rank-0001-s2.log")
    assert logs == [f"attempt-000{attempt}/{name}" for attempt in (1, 2) for name in names]
    assert (
        "first" in (tmp_path / "logs" / logs[1]).read_text()
        and "again" in (tmp_path / "logs" / logs[3]).read_text()
    )
    assert not left(lab)


@release
@pytest.mark.parametrize("what", ["raise", "exit2"])
def test_what_cannot_heal_is_not_started_again(tmp_path, what):
    code, output = run(None, 1, *LAUNCH, "-np", "2", "--gloo", "--max-restarts", "3", "--logs", str(tmp_path / "logs"),
                       "--", *fate(tmp_path, what, "1"), cwd=tmp_path)  # fmt: skip
    assert code == {"raise": 1, "exit2": 2}[what], output
    assert "restart 1" not in output and last_line(output).startswith(
        "hvtrain: FIRST FAILURE rank 1 host localhost: "
    )


@needs_lab
@pytest.mark.parametrize(
    ("hosts", "options", "then"),
    [
        pytest.param("s1:1,s2:1,s3:1", (), "s1:1,s3:1", marks=nightly),
        pytest.param("s1:1,s2:1", ("--min-np", "1"), "s1:1", marks=release),
    ],
)
def test_a_lost_host_is_left_out(tmp_path, hosts, options, then):
    """Where another one has room, or fewer ranks are enough."""
    with Lab(3) as lab:
        more = ("--max-restarts", "1", "--logs", str(tmp_path / "logs"), *options)
        launched = started(
            lab, line("launch-gloo", hosts, *fate(tmp_path, "wait-once", "0"), options=more)
        )
        wait_for(tmp_path / "rank-0")
        wait_for(tmp_path / "rank-1")
        lab("stop", "s2")
        output = finish(launched)
        assert launched.returncode == 0, output
        lost = "FIRST FAILURE rank 1 host s2: the connection to host s2 was lost; check that it is up, then run the s"
        assert lost in output
        assert f"hvtrain: restart 1 of 1 in 1 s, from the newest checkpoint, on {then}\n" in output
        assert "rank 0 first" in output and "rank 0 again" in output


@needs_lab
@nightly
def test_too_few_hosts_use_up_the_restarts(tmp_path):
    """The code still says that the same command may help: the host may come back."""
    with Lab(2) as lab:
        more = ("--max-restarts", "2", "--logs", str(tmp_path / "logs"))
        launched = started(
            lab, line("launch-gloo", "s1:1,s2:1", *fate(tmp_path, "wait", "0"), options=more)
        )
        wait_for(tmp_path / "rank-1")
        lab("stop", "s2")
        output = finish(launched)
        assert launched.returncode == 75, output
        message = (
            "restart 2 of 2 is skipped, since 2 ranks need more hosts: host s2 cannot be reached"
        )
        assert message in last_line(output), output


@release
def test_ctrl_c_ends_a_pause(tmp_path):
    launched = start(None, 1, *LAUNCH, "-np", "2", "--gloo", "--max-restarts", "9", "--logs", str(tmp_path / "logs"),
                     "--", *fate(tmp_path, "SIGKILL", "1"), cwd=tmp_path)  # fmt: skip
    output = ""
    while "restart 3 of 9 in 4 s" not in output:
        output += launched.stdout.readline()
    launched.send_signal(2)
    output += finish(launched)
    assert launched.returncode == 130 and "restart 4" not in output, output


def training(tmp_path, name, how, struck, *settings):
    """The newest checkpoint of a training whose rank `struck` is killed once, after 30 steps."""
    run_dir = tmp_path / name
    strike = [
        f"+callbacks.strike.{setting}"
        for setting in (f"done={run_dir / 'struck'}", f"rank={struck}", "step=30")
    ]
    code, output = run(
        None, 1, *LAUNCH, "-np", "2", how, "--max-restarts", "1", "--", "train.epochs=3", "checkpoint.every_steps=7",
        "data.uneven=trim", f"run.dir={run_dir}", "+callbacks.strike._target_=strike.Strike", *strike, *settings,
        cwd=tmp_path, **STRIKES,
    )  # fmt: skip
    assert code == 0, output
    if struck >= 0:
        assert f"FIRST FAILURE rank {struck} host localhost: killed by SIGKILL" in output
        restart = r"restart 1 of 1 in 1 s, from the newest checkpoint \(here: step-000000(22|28)\), on localhost:2"
        match = re.search(restart, output)
        assert match and re.search(rf"^resumed +step-000000{match[1]}", output, re.MULTILINE), (
            output
        )
    return sorted((run_dir / "checkpoints").glob("step-*"))[-1]


@release
@pytest.mark.parametrize(("how", "rank"), [("--gloo", 1), ("--mpi", 0)])
def test_a_training_that_is_started_again_ends_at_the_same_bits(tmp_path, how, rank):
    """Weights, slots and all else of the last checkpoint are those of a run left alone. Each night: test_soak.py."""
    ends = []
    for name, struck in (("whole", -1), ("struck", rank)):
        newest = training(tmp_path, name, how, struck, "train.deterministic=true")
        ends.append(
            (newest.name, hashlib.sha256((newest / "state.safetensors").read_bytes()).hexdigest())
        )
    assert ends[0] == ends[1]


@needs_lab
@release
def test_a_training_goes_on_with_the_hosts_that_are_left(tmp_path):
    """On one rank instead of two: the weights of a run that nothing happened to, up to the order of additions."""
    settings = [
        "model=mlp",
        "train.epochs=60",
        "data.uneven=trim",
        "checkpoint.every_steps=7",
        "checkpoint.keep=500",
        "schedule=cosine",
    ]
    options = ("--max-restarts", "1", "--min-np", "1")
    with Lab(2) as lab:
        code, output = lab.run(
            "s1", *line("launch-gloo", "s1:1,s2:1", *settings, f"run.dir={tmp_path / 'whole'}")
        )
        assert code == 0, output
        struck = tmp_path / "struck"
        launched = started(
            lab, line("launch-gloo", "s1:1,s2:1", *settings, f"run.dir={struck}", options=options)
        )
        wait_for(struck / "checkpoints" / "step-00000028")
        lab("stop", "s2")
        output = finish(launched)
    assert launched.returncode == 0, output
    assert re.search(
        r"restart 1 of 1 in 1 s, from the newest checkpoint \(here: step-\d+\), on s1:1\n", output
    ), output
    assert "on 2 ranks; on 1 now: global batch 64 and learning rate as before" in output
    last = "checkpoints/step-00001320/state.safetensors"
    ours = load_file(struck / last)
    whole = load_file(tmp_path / "whole" / last)
    names = [name for name in whole if name.startswith(("model/", "optimizer/"))]
    assert (
        max(np.max(np.abs(ours[n] - whole[n])) / (np.max(np.abs(whole[n])) or 1) for n in names)
        < 1e-3
    )


@needs_lab
@release
def test_the_host_that_has_the_checkpoints_fails_twice():
    """Without it the run does not begin anew; with it, in whatever order, it goes on to the bits of a whole run."""
    settings = [
        "model=mlp",
        "train.epochs=3",
        "data.uneven=trim",
        "train.deterministic=true",
        "checkpoint.every_steps=7",
    ]
    strike = [
        f"+callbacks.strike.{setting}"
        for setting in ("_target_=strike.StrikeHost", "host=s1", "step=25")
    ]
    variables = f"PYTHONPATH={STRIKES['PYTHONPATH']}"
    with Lab(2) as lab:

        def launch(hosts, run, *more, options=()):
            launched = line(
                "launch-gloo", hosts, *settings, f"run.dir={lab.home / run}", *more, options=options
            )
            return lab.run("s1", "env", variables, *launched)

        code, output = launch("s1:1,s2:1", "whole")
        assert code == 0, output
        code, output = launch(
            "s1:1,s2:1", "run", *strike, options=("--max-restarts", "5", "--min-np", "1")
        )
        assert code == 2, output
        steps = [
            int(step)
            for step in re.findall(r"from the newest checkpoint \(here: step-(\d+)\), on", output)
        ]
        assert len(steps) == 2 and 0 < steps[0] <= 25 and steps[0] < steps[1] <= 50, output
        refused = rf"step-{steps[1]:08d} of this run is on host s1, which has no rank now, and there is none on s2; "
        assert len(re.findall(f"^hvtrain: .*{refused}", output, re.MULTILINE)) == 1, output
        assert not list(lab.of("s2").glob("run/checkpoints/step-*"))
        code, output = launch("s2:1,s1:1", "run")
        assert code == 0, output
        assert re.search(
            rf"^resumed +step-{steps[1]:08d} on s1: {steps[1]} of 66 steps", output, re.MULTILINE
        ), output
        ends = [lab.of(host) / run / "checkpoints" / "step-00000066" / "state.safetensors"
                for host, run in (("s1", "whole"), ("s2", "run"))]  # fmt: skip
        assert ends[0].read_bytes() == ends[1].read_bytes()


@nightly
def test_no_row_of_the_history_is_lost(tmp_path):
    """Killed between an epoch's row and its checkpoint, whichever comes first."""
    settings = [
        "model=mlp", "train.epochs=4", "checkpoint.every_steps=7", f"run.dir={tmp_path / 'run'}",
        "+callbacks.strike._target_=strike.StrikeAtHistory", "+callbacks.strike.epoch=2",
        f"+callbacks.strike.done={tmp_path / 'done'}",
    ]  # fmt: skip
    for expected in (-9, 0):
        code, output = run(
            None, 1, "python", "-m", "hvtrain", *settings, cwd=tmp_path, cold=True, **STRIKES
        )
        assert code == expected, output
    rows = [line.split(",") for line in (tmp_path / "run" / "history.csv").read_text().splitlines()]
    steps_of_an_epoch = int(rows[1][1])
    assert [row[:2] for row in rows[1:]] == [
        [str(epoch), str(epoch * steps_of_an_epoch)] for epoch in range(1, 5)
    ]
    assert len({row[2] for row in rows[1:]}) == 1, "one learning rate"
