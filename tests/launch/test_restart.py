"""python -m hvtrain.launch --max-restarts: what can heal is started again, from the newest checkpoint."""

import hashlib
import re
import sys

import numpy as np
import pytest
from safetensors.numpy import load_file

from hvtrain.launch.job import Host
from hvtrain.launch.restart import chosen
from lab import Lab, needs_lab
from launcher_lab import fate, last_line, left, line, started, wait_for
from launching import ROOT, finish, run, start

pytestmark = pytest.mark.distributed

LAUNCH = [sys.executable, "-m", "hvtrain.launch"]
HOSTS = (Host("s1", 2), Host("s2", 2), Host("s3", 2))


@pytest.fixture(scope="module")
def lab():
    with Lab(3) as made:
        yield made


@pytest.mark.parametrize(
    ("ranks", "least", "failed", "absent", "found"),
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
def test_the_hosts_to_go_on_with(ranks, least, failed, absent, found):
    """A bad host is left out where the others are enough, an absent one always."""
    hosts = chosen(HOSTS, ranks, least, failed, absent)
    assert (hosts and (" ".join(host.name for host in hosts[0]), hosts[1])) == found


@needs_lab
@pytest.mark.parametrize("how", ["launch-gloo", pytest.param("launch-mpi", marks=pytest.mark.release)])
def test_a_killed_rank_is_started_again(lab, tmp_path, how):
    """Each attempt ends with what ended it, and has its own log of each rank."""
    (tmp_path / "ranks").mkdir()
    options = ("--max-restarts", "2", "--logs", str(tmp_path / "logs"))
    words = line(how, "s1:1,s2:1", *fate(tmp_path / "ranks", "SIGKILL-once", "1"), options=options)
    code, output = lab.run("s1", *words)
    assert code == 0, output
    said = [text for text in output.splitlines() if text.startswith("hvtrain: ")]
    assert re.match("hvtrain: FIRST FAILURE rank 1 host s2: killed by SIGKILL", said[1]), output
    assert said[2:] == ["hvtrain: restart 1 of 2 in 1 s, from the newest checkpoint, on s1:1,s2:1"], output
    logs = sorted(str(path.relative_to(tmp_path / "logs")) for path in (tmp_path / "logs").rglob("*.log"))
    names = ("rank-0000-s1.log", "rank-0001-s2.log")
    assert logs == [f"attempt-000{attempt}/{name}" for attempt in (1, 2) for name in names]
    assert "first" in (tmp_path / "logs" / logs[1]).read_text() and "again" in (tmp_path / "logs" / logs[3]).read_text()
    assert not left(lab)


@pytest.mark.parametrize("what", ["raise", pytest.param("exit2", marks=pytest.mark.release)])
def test_what_cannot_heal_is_not_started_again(tmp_path, what):
    code, output = run(None, 1, *LAUNCH, "-np", "2", "--gloo", "--max-restarts", "3", "--logs", str(tmp_path / "logs"),
                       "--", *fate(tmp_path, what, "1"), cwd=tmp_path)  # fmt: skip
    assert code == {"raise": 1, "exit2": 2}[what], output
    assert "restart 1" not in output and last_line(output).startswith("hvtrain: FIRST FAILURE rank 1 host localhost: ")


@needs_lab
@pytest.mark.parametrize(
    ("hosts", "options", "then"),
    [
        pytest.param("s1:1,s2:1,s3:1", (), "s1:1,s3:1", marks=pytest.mark.nightly),
        pytest.param("s1:1,s2:1", ("--min-np", "1"), "s1:1", marks=pytest.mark.release),
    ],
)
def test_a_lost_host_is_left_out(tmp_path, hosts, options, then):
    """Where another one has room, or fewer ranks are enough."""
    with Lab(3) as lab:
        more = ("--max-restarts", "1", "--logs", str(tmp_path / "logs"), *options)
        script = "import os, time; open(f'{0}/rank-' + os.environ['HOROVOD_RANK'], 'a').write('x'); time.sleep(12)"
        launched = started(lab, line("launch-gloo", hosts, "python", "-c", script.format(tmp_path), options=more))
        wait_for(tmp_path / "rank-1")
        lab("stop", "s2")
        output = finish(launched, 120)
        assert launched.returncode == 0, output
        assert f"hvtrain: restart 1 of 1 in 1 s, from the newest checkpoint, on {then}\n" in output
        assert (tmp_path / "rank-0").read_text() == "xx"


@needs_lab
@pytest.mark.nightly
def test_too_few_hosts_use_up_the_restarts(tmp_path):
    """The code still says that the same command may help: the host may come back."""
    with Lab(2) as lab:
        more = ("--max-restarts", "2", "--logs", str(tmp_path / "logs"))
        launched = started(lab, line("launch-gloo", "s1:1,s2:1", *fate(tmp_path, "wait", "0"), options=more))
        wait_for(tmp_path / "rank-1")
        lab("stop", "s2")
        output = finish(launched, 200)
        assert launched.returncode == 75, output
        assert "restart 2 of 2 is left out, for 2 ranks need more hosts: host s2 " in last_line(output), output


@pytest.mark.nightly
def test_ctrl_c_ends_a_pause(tmp_path):
    launched = start(None, 1, *LAUNCH, "-np", "2", "--gloo", "--max-restarts", "9", "--logs", str(tmp_path / "logs"),
                     "--", *fate(tmp_path, "SIGKILL", "1"), cwd=tmp_path)  # fmt: skip
    said = ""
    while "restart 3 of 9 in 4 s" not in said:
        said += launched.stdout.readline()
    launched.send_signal(2)
    said += finish(launched, 60)
    assert launched.returncode == 130 and "restart 4" not in said, said


@pytest.mark.parametrize(
    ("how", "rank"),
    [pytest.param("--gloo", 1, marks=pytest.mark.nightly), pytest.param("--mpi", 0, marks=pytest.mark.release)],
)
def test_a_training_that_is_started_again_ends_at_the_same_bits(tmp_path, how, rank):
    """Killed in its second epoch; weights, slots and all else of the last checkpoint are those of a run left alone."""
    variables = {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests' / 'support' / 'launched'}"}
    ends = {}
    for name, struck in (("whole", -1), ("struck", rank)):
        words = [
            "train.epochs=3", "train.deterministic=true", "checkpoint.every_steps=7", f"run.dir={tmp_path / name}",
            "+callbacks.strike._target_=strike.Strike", f"+callbacks.strike.done={tmp_path / name / 'struck'}",
            f"+callbacks.strike.rank={struck}", "+callbacks.strike.step=30",
        ]  # fmt: skip
        code, output = run(
            None, 1, *LAUNCH, "-np", "2", how, "--max-restarts", "1", "--", *words, cwd=tmp_path, **variables
        )
        assert code == 0, output
        newest = sorted((tmp_path / name / "checkpoints").glob("step-*"))[-1]
        ends[name] = (newest.name, hashlib.sha256((newest / "state.safetensors").read_bytes()).hexdigest())
        if name == "struck":
            assert f"FIRST FAILURE rank {rank} host localhost: killed by SIGKILL" in output
            assert re.search(
                r"restart 1 of 1 in 1 s, from the newest checkpoint \(here: step-000000(22|28)\), on localhost:2",
                output,
            ), output
    assert ends["whole"] == ends["struck"]


@needs_lab
@pytest.mark.release
def test_a_training_goes_on_with_the_hosts_that_are_left(tmp_path):
    """On one rank instead of two: the weights of a run that nothing happened to, up to the order of additions."""
    words = ["model=mlp", "train.epochs=60", "checkpoint.every_steps=7", "checkpoint.keep=500", "schedule=cosine"]
    options = ("--max-restarts", "1", "--min-np", "1")
    with Lab(2) as lab:
        code, output = lab.run("s1", *line("launch-gloo", "s1:1,s2:1", *words, f"run.dir={tmp_path / 'whole'}"))
        assert code == 0, output
        struck = tmp_path / "struck"
        launched = started(lab, line("launch-gloo", "s1:1,s2:1", *words, f"run.dir={struck}", options=options))
        wait_for(struck / "checkpoints" / "step-00000028")
        lab("stop", "s2")
        output = finish(launched, 120)
    assert launched.returncode == 0, output
    assert re.search(r"restart 1 of 1 in 1 s, from the newest checkpoint \(here: step-\d+\), on s1:1\n", output), output
    assert "on 2 ranks; on 1 now: global batch 64 and learning rate as before" in output
    ours, theirs = (load_file(run / "checkpoints" / "step-00001320" / "state.safetensors") for run in
                    (struck, tmp_path / "whole"))  # fmt: skip
    names = [name for name in theirs if name.startswith(("model/", "optimizer/"))]
    assert max(np.max(np.abs(ours[n] - theirs[n])) / (np.max(np.abs(theirs[n])) or 1) for n in names) < 1e-3


@needs_lab
@pytest.mark.release
def test_the_host_that_has_the_checkpoints_fails_twice():
    """Without it the run does not begin anew; with it, in whatever order, it goes on to the bits of a whole run."""
    words = ["model=mlp", "train.epochs=3", "train.deterministic=true", "checkpoint.every_steps=7"]
    strike = [f"+callbacks.strike.{word}" for word in ("_target_=strike.StrikeHost", "host=s1", "step=25")]
    variables = f"PYTHONPATH={ROOT}:{ROOT / 'tests' / 'support' / 'launched'}"
    with Lab(2) as lab:

        def launch(hosts, run, *more, options=()):
            launched = line("launch-gloo", hosts, *words, f"run.dir={lab.home / run}", *more, options=options)
            return lab.run("s1", "env", variables, *launched)

        code, output = launch("s1:1,s2:1", "whole")
        assert code == 0, output
        code, output = launch("s1:1,s2:1", "run", *strike, options=("--max-restarts", "5", "--min-np", "1"))
        assert code == 2, output
        steps = [int(step) for step in re.findall(r"from the newest checkpoint \(here: step-(\d+)\), on", output)]
        assert len(steps) == 2 and 0 < steps[0] <= 25 and steps[0] < steps[1] <= 50, output
        refused = rf"step-{steps[1]:08d} of this run is on host s1, which has no rank now, and there is none on s2; "
        assert len(re.findall(f"^hvtrain: .*{refused}", output, re.MULTILINE)) == 1, output
        assert not list(lab.of("s2").glob("run/checkpoints/step-*"))
        code, output = launch("s2:1,s1:1", "run")
        assert code == 0, output
        assert re.search(rf"^resumed +step-{steps[1]:08d} on s1: {steps[1]} of 66 steps", output, re.MULTILINE), output
        ends = [lab.of(host) / run / "checkpoints" / "step-00000066" / "state.safetensors"
                for host, run in (("s1", "whole"), ("s2", "run"))]  # fmt: skip
        assert ends[0].read_bytes() == ends[1].read_bytes()


@pytest.mark.nightly
def test_no_row_of_the_history_is_lost(tmp_path):
    """Killed between an epoch's row and its checkpoint, whichever comes first."""
    rows = {}
    variables = {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests' / 'support' / 'launched'}"}
    for name in ("whole", "struck"):
        words = ["model=mlp", "train.epochs=4", "checkpoint.every_steps=7", f"run.dir={tmp_path / name}"]
        if name == "struck":
            words += ["+callbacks.strike._target_=strike.StrikeAtHistory", "+callbacks.strike.epoch=2"]
            words.append(f"+callbacks.strike.done={tmp_path / 'done'}")
            assert run(None, 1, "python", "-m", "hvtrain", *words, cwd=tmp_path, **variables)[0] == -9
        code, output = run(None, 1, "python", "-m", "hvtrain", *words, cwd=tmp_path, **variables)
        assert code == 0, output
        lines = (tmp_path / name / "history.csv").read_text().splitlines()
        rows[name] = [line.split(",")[:3] for line in lines]
    assert len(rows["whole"]) == 5 and rows["struck"] == rows["whole"]
