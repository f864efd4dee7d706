"""The batch file in Slurm itself, with daemons of the tests' own: it is taken, saves before its limit, and goes on."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from hvtrain.config.validate import typed
from hvtrain.errors import ConfigError
from hvtrain.launch.cluster_files import texts
from hvtrain.launch.cluster_kinds import Slurm, slurm_seconds
from hvtrain.launch.job import Job, parse_hosts
from slurm_cluster import cluster as cluster

BIN = Path(sys.executable).parent
RUN = ("python", "-m", "hvtrain")
WORDS = ("callbacks=[a,b]", '+x=it\'s $HOME $(id) `id` "q"', "a b")
VALUES = {"TF_FLAGS": "a 'b' $c `id`\nd"}

# In place of `python -m hvtrain launch`: says what it was given; told to save, it ends with 75; started again, with 0.
LAUNCHER = """#!/bin/bash
printf '<%s>' "$@"; echo
printf 'TF_FLAGS=%q in %s\\n' "$TF_FLAGS" "$PWD"
if ((SLURM_RESTART_COUNT)); then echo "went on"; exit 0; fi
trap 'sleep 2; echo saved; exit 75' USR1
while true; do sleep 0.2; done
"""


@pytest.mark.nightly
@pytest.mark.distributed
def test_before_its_limit_a_job_saves_and_goes_on(cluster):
    """Two hosts; the signal comes from Slurm itself, which here sends it in the first half of the two minutes."""
    (cluster.folder / "bin").mkdir()
    (cluster.folder / "bin" / "python").write_text(LAUNCHER)
    (cluster.folder / "bin" / "python").chmod(0o755)
    (cluster.folder / "work dir").mkdir()
    settings = Slurm(
        time="2",
        nodes=2,
        gpus_per_rank=0,
        cpus_per_rank=2,
        signal_seconds=55,
        output=f"{cluster.folder}/out-%j.txt",
        workdir=f"{cluster.folder}/work dir",
        setup=f"PATH={cluster.folder}/bin:$PATH; : $UNSET",
    )
    job = Job((*RUN, *WORDS), 4, environment=VALUES)
    job_id = cluster.submit("standin", job, settings, change=("USR1@55", "USR1@85"))
    cluster.wait(job_id, lambda: "continues when Slurm starts it again" in cluster.printed(job_id))
    cluster.start_again_soon(job_id)
    cluster.wait(job_id, lambda: cluster.field(job_id, "JobState") == "COMPLETED")
    printed = cluster.printed(job_id)
    arguments = [
        "-m",
        "hvtrain",
        "launch",
        "-np",
        "4",
        "-H",
        "s1:2,s2:2",
        "--gloo",
        "--env",
        "TF_FLAGS",
        "--",
        *WORDS,
    ]
    arguments += [f"run.dir=runs/slurm-{job_id}", "resume=auto"]
    assert printed.count("".join(f"<{argument}>" for argument in arguments)) == 2
    assert printed.count(f"in {cluster.folder}/work dir\n") == 2
    assert r"TF_FLAGS=$'a \'b\' $c `id`\nd' in" in printed
    assert (
        printed.index("start 1")
        < printed.index("saved")
        < printed.index("start 2")
        < printed.index("went on")
    )
    assert cluster.field(job_id, "Restarts") == "1"


@pytest.mark.release
@pytest.mark.distributed
def test_a_training_goes_on_in_its_second_start(cluster):
    """The real launcher, a real rank on each of two hosts. The signal comes by hand, once the training is under way."""
    settings = Slurm(
        time="30",
        nodes=2,
        gpus_per_rank=0,
        cpus_per_rank=1,
        output=f"{cluster.folder}/out-%j.txt",
        workdir=str(cluster.folder),
        setup=f"PATH={BIN}:$PATH",
    )
    job = Job(
        (*RUN, "model=mlp", "dataset=digits", "train.epochs=40"),
        2,
        environment={"TF_NUM_INTRAOP_THREADS": "1"},
    )
    job_id = cluster.submit("training", job, settings)
    cluster.wait(job_id, lambda: "Epoch 3/40" in cluster.printed(job_id))
    cluster.ask("scancel", "--batch", "--signal=USR1", job_id)
    cluster.wait(job_id, lambda: "continues when Slurm starts it again" in cluster.printed(job_id))
    run = cluster.folder / "runs" / f"slurm-{job_id}"
    assert not (run / "result.json").exists()
    cluster.start_again_soon(job_id)
    cluster.wait(job_id, lambda: cluster.field(job_id, "JobState") == "COMPLETED")
    second = cluster.printed(job_id).partition("start 2")[2]
    assert "Epoch 1/40" not in second and "Epoch 40/40" in second, second
    assert re.search(r"^devices +0 s1 CPU, 1 s2 CPU$", second, re.MULTILINE), second
    assert json.loads((run / "result.json").read_text())["num_ranks"] == 2


def text(job, **settings):
    (batch_file,) = texts(typed(Slurm, {"time": "1:00:00", **settings}, "cluster."), job).values()
    return batch_file


def test_a_folder_that_only_the_ranks_can_name_is_not_searched_by_the_script():
    batch_file = text(Job((*RUN, "run.dir=${oc.env:SCRATCH}/a"), 2))
    assert "find '${oc" not in batch_file and "was_asked" in batch_file


def test_what_is_not_asked_for_stays_out():
    batch_file = text(Job(RUN, 8), nodes=2, gpus_per_rank=0)
    for option in ("gpus-per-node", "partition", "account", "qos", "export", "--env"):
        assert option not in batch_file
    assert "--ntasks-per-node=4" in batch_file and "--nodes=2" in batch_file
    assert "--gpus-per-node=4" in text(Job(RUN, 8), ranks_per_node=4)
    assert "--nodes=1\n" in text(Job(RUN, 8))


def test_commands_of_another_kind_and_a_run_folder_of_ones_own_are_kept():
    own = text(Job(("python", "my_script.py", "a b"), 2))
    assert "python my_script.py 'a b' &" in own and "run.dir" not in own
    named = text(Job((*RUN, "run.dir=/shared/a b"), 2))
    assert "runs/slurm-" not in named and "find '/shared/a b'/checkpoints" in named


STARTED = """#!/bin/bash
echo start >>starts
step="$((99999997 + $(wc -l <starts)))"
[[ $SAVES != yes ]] || mkdir -p "runs/slurm-7/checkpoints/step-$step"
exit 75
"""


@pytest.mark.parametrize("saves", ["no", "yes"])
def test_a_job_that_saves_nothing_is_not_started_forever(saves, tmp_path):
    """The batch file as Slurm would run it, again for each requeue, with a launcher that always asks for a restart.

    Checkpoints are ordered by number: after step 99,999,999 names have one digit more.
    """
    requeue = "#!/bin/bash\n[[ $1 == requeue ]] && echo s1 >>requeues || echo s1\n"
    (tmp_path / "bin").mkdir()
    for name, body in {
        "python": STARTED,
        "scontrol": requeue,
        "job": text(Job(RUN, 2), idle_requeues=2),
    }.items():
        (tmp_path / "bin" / name).write_text(body)
        (tmp_path / "bin" / name).chmod(0o755)
    slurm_sets = {
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NODELIST": "s1",
        "SLURM_NTASKS": "2",
        "SAVES": saves,
    }
    environment = {**os.environ, **slurm_sets, "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"}
    starts = [
        subprocess.run(
            [tmp_path / "bin/job"],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        for _ in range(4)
    ]
    requeues = (tmp_path / "requeues").read_text().count("s1")
    if saves == "yes":
        assert requeues == 4 and [done.returncode for done in starts] == [75] * 4
        assert "(it has saved step-100000001)" in starts[3].stdout
    else:
        assert [done.returncode for done in starts] == [75, 75, 1, 75] and requeues == 3
        assert (
            "continues when Slurm starts it again (no newer checkpoint, requeue 2 of 2)"
            in starts[1].stdout
        )
        assert (
            "is not started again: 3 starts in a row ended without a newer checkpoint"
            in starts[2].stderr
        )


def test_shellcheck_finds_nothing(tmp_path):
    shellcheck = shutil.which("shellcheck", path=f"{BIN}:{os.environ['PATH']}") or pytest.skip(
        "no shellcheck here"
    )
    (tmp_path / "job").write_text(
        text(Job((*RUN, *WORDS), 2, environment=VALUES), setup="true", workdir="a b")
    )
    (tmp_path / "own").write_text(text(Job(("python", "script.py"), 2)))
    # SC2016: words that hold a dollar are meant to.
    checked = subprocess.run(
        [shellcheck, "-e", "SC2016", "job", "own"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert checked.returncode == 0, checked.stdout


@pytest.mark.parametrize(
    ("limit", "expected"),
    [
        ("90", 5400),
        ("1:30", 90),
        ("1:30:00", 5400),
        ("2-12", 216000),
        ("1-0:30", 88200),
        ("1-1:01:01", 90061),
    ],
)
def test_time_limits_are_read_as_slurm_reads_them(limit, expected):
    assert slurm_seconds(limit) == expected


@pytest.mark.parametrize(
    ("job", "settings", "message"),
    [
        (Job(RUN, 2), {"time": None}, "cluster.time is not set"),
        (Job(RUN, 2), {"time": "2h"}, "cluster.time=2h is not a time limit"),
        (Job(RUN, 2), {"time": "3"}, "the run is told to save up to 180 s before the limit"),
        (Job(RUN, 6), {"nodes": 4}, "-np 6 is not cluster.nodes=4 x cluster.ranks_per_node=1"),
        (
            Job(RUN, 6),
            {"nodes": 2, "ranks_per_node": 4},
            "cluster.nodes=2 x cluster.ranks_per_node=4",
        ),
        (Job(RUN, 2, parse_hosts("s1,s2")), {}, "does not take -H"),
        (Job(RUN, 2, min_ranks=1), {}, "does not take --min-np"),
        (Job(RUN, 2), {"partition": "a b"}, "cluster.partition=a b is not what #SBATCH can take"),
    ],
)
def test_what_cannot_start_is_refused_in_one_line(job, settings, message):
    with pytest.raises(ConfigError, match=message) as error:
        text(job, **settings)
    assert "\n" not in str(error.value)
