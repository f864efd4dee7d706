"""What `launch` makes of its command line, without starting anything."""

import shlex
import subprocess
import sys
from types import SimpleNamespace

import pytest

from hvtrain.errors import BusyError, ConfigError
from hvtrain.launch import cluster_files, command, horovod_changes, restart
from hvtrain.launch.cluster_kinds import Slurm, _run_folder, is_training
from hvtrain.system import secrets
from hvtrain.system.checkpoint_notes import NoteKeeper
from hvtrain.system.run_lock import RunLock

RUN = ("python", "-m", "hvtrain")
OPTIONS = SimpleNamespace(
    num_ps=None, job_name=None, logs=None, dry_run=False, output=None, max_restarts=0
)


def test_launches_of_the_same_second_have_their_own_folders(tmp_path):
    names = [command._make_run_folder(str(tmp_path / "runs/now")) for _ in range(3)]
    assert names == [str(tmp_path / f"runs/now{end}") for end in ("", "-2", "-3")]


def test_a_run_folder_in_use_is_refused_before_its_logs_are_replaced(tmp_path, monkeypatch):
    log = tmp_path / "launch/rank-0000-localhost.log"
    log.parent.mkdir()
    log.write_text("of the run in use")
    monkeypatch.setattr(RunLock.take, "__defaults__", (0.0,))
    arguments = ["launch", "-np", "1", "--", "model=mlp", f"run.dir={tmp_path}"]
    monkeypatch.setattr(sys, "argv", arguments)
    with RunLock() as lock:
        lock.take(tmp_path)
        with pytest.raises(BusyError, match="is in use by another run"):
            command.main()
    assert log.read_text() == "of the run in use"


def test_a_run_folder_that_cannot_be_locked_is_one_line(tmp_path, monkeypatch):
    (tmp_path / ".lock").mkdir()
    arguments = ["launch", "-np", "1", "--", "model=mlp", f"run.dir={tmp_path}"]
    monkeypatch.setattr(sys, "argv", arguments)
    with pytest.raises(ConfigError, match="cannot be written: Is a directory; choose another"):
        command.main()


def test_a_restart_resumes_what_its_launch_has_saved(tmp_path):
    options = SimpleNamespace(num_ps=None, job_name=None, max_restarts=1)
    arguments = ["debug=fast", f"run.dir={tmp_path}"]
    assert command._run(arguments, options, None).command[-1] == "resume=never"
    new = command._run(["debug=fast"], options, None)
    assert new.is_new and "resume=auto" in new.command, "a new folder has nothing to refuse"
    with pytest.raises(ConfigError, match="resume=never would refuse the checkpoints in s3://b/x"):
        command._run(["resume=never", "run.dir=s3://b/x"], options, None)


def test_a_checkpoint_on_another_host_counts_too(tmp_path):
    """Rank 0 may be on a host other than the launcher's, with the checkpoints on its disk."""
    assert not restart._has_checkpoint(None)
    keeper = NoteKeeper(tmp_path, "s2", "0123456789abcdef")
    keeper.note(0)
    assert not restart._has_checkpoint(tmp_path)
    keeper.note(5)
    assert restart._has_checkpoint(tmp_path)
    assert restart._note_for_ranks(tmp_path) == {"HVTRAIN_NEWEST_CHECKPOINT": "5@s2"}


@pytest.mark.parametrize(("kind", "names"), [("mpijob", "MINE,OTHER"), ("slurm", None)])
def test_the_ranks_of_a_cluster_get_the_variables_on_all_hosts(kind, names, tmp_path, monkeypatch):
    """A cluster's file starts horovodrun, which sends only what it is told. Slurm's file has `launch --env NAME`."""
    job = []
    monkeypatch.setattr(
        command, "_write_files", lambda options, cluster, ready, folders: job.append(ready) or 0
    )
    arguments = ["launch", "-np", "2", "--env", "MINE=1", "--env", "OTHER=2", f"cluster={kind}"]
    monkeypatch.setattr(sys, "argv", [*arguments, "--", "model=mlp", f"run.dir={tmp_path}"])
    assert command.main() == 0
    assert job[0].environment.get("HVTRAIN_ENV") == names


def test_addresses_go_to_the_ranks_in_a_variable(monkeypatch):
    monkeypatch.setenv(secrets.NOTIFY_VARIABLE, "json://before")
    words = command._without_addresses(["model=mlp", "notify=json://here"], None)
    assert words == ["model=mlp", "notify=null"]
    assert command.os.environ[secrets.NOTIFY_VARIABLE] == "json://here"
    assert command._without_addresses(["notify=null"], None) == ["notify=null"]


@pytest.mark.parametrize(
    ("words", "trains", "folder"),
    [
        (("model=mlp",), True, None),
        ((), True, None),
        (("run.dir=s3://bucket/run",), True, "s3://bucket/run"),
        (("run.dir='runs/lr=0.1'",), True, "runs/lr=0.1"),
        (("run.dir=~/x(1)",), True, "~/x(1)"),
        (("run.dir=2026_11_30",), True, "2026_11_30"),
        (("run.dir=null",), True, None),
        (("run.dir=runs/a", "run.dir=runs/b"), True, "runs/b"),
        (("evaluate", "run=runs/a"), False, None),
    ],
)
def test_what_a_command_of_a_batch_file_does(words, trains, folder):
    assert is_training((*RUN, *words)) is trains
    assert _run_folder((*RUN, *words)) == folder


def test_all_processes_get_the_run_folder_that_the_settings_give(tmp_path):
    """One that each of them would compose for itself, or that stands in a file."""
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment/mine.yaml").write_text(
        "# @package _global_\nrun: {dir: results/mine}\n"
    )
    run = command._run(["--config-dir", str(tmp_path), "experiment=mine"], OPTIONS, None)
    assert (run.command[-1], run.folder, run.is_new) == (
        "run.dir=results/mine",
        "results/mine",
        False,
    )
    run = command._run(["run.dir=runs/${now:%Y}"], OPTIONS, None)
    assert run.command[-1] == f"run.dir={run.folder}" and "$" not in run.folder
    assert command._run(["run.dir=runs/a"], OPTIONS, None).command == (*RUN, "run.dir=runs/a")
    for name in ("a,b", "café"):
        run = command._run([f"run.name='{name}'"], OPTIONS, None)
        assert run.command[-1] == f"run.dir='{run.folder}'"


def test_a_setting_whose_path_ends_in_python_is_no_command():
    """Every rank tried to execute it, and failed: No such file or directory."""
    run = command._run(["run.dir=runs/python-3.12", "model=mlp"], OPTIONS, None)
    assert run.command == (*RUN, "run.dir=runs/python-3.12", "model=mlp")


def test_a_batch_job_may_not_refuse_its_own_checkpoints():
    with pytest.raises(ConfigError, match=r"resume=never would refuse .* cluster=slurm resumes"):
        command._run(["resume=never"], OPTIONS, Slurm())


def test_ranks_on_other_hosts_work_in_this_folder(tmp_path, monkeypatch):
    """Also if its name has a blank, which Horovod's own cd does not quote."""
    folder = tmp_path / "my project"
    folder.mkdir()
    monkeypatch.chdir(folder)
    commands = []
    monkeypatch.setattr(horovod_changes.remote, "get_remote_command", commands.append)
    horovod_changes._command_by_ssh(shlex.quote(f"cd {folder} > /dev/null 2>&1 ; pwd"))
    # ssh passes the line to the shell of the other host.
    line = ["sh", "-c", *shlex.split(commands[0])]
    done = subprocess.run(
        line, cwd="/", stdin=subprocess.DEVNULL, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == str(folder)


@pytest.mark.parametrize(
    ("time", "expected"),
    [("time: 12:00:00", "12:00:00"), ("time: 90", "90"), ("<<: {time: 5}", "5")],
)
def test_times_in_a_cluster_file_stay_as_they_are_written(time, expected, tmp_path):
    (tmp_path / "cluster").mkdir()
    (tmp_path / "cluster/mine.yaml").write_text(f"kind: slurm\n{time}\n")
    assert cluster_files.choose(["cluster=mine"], [tmp_path]).time == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("slurm", "holds no settings; write lines such"),
        ("time: 90", "names no kind of cluster; write"),
    ],
)
def test_a_cluster_file_without_a_kind_is_refused(text, message, tmp_path):
    (tmp_path / "cluster").mkdir()
    (tmp_path / "cluster/mine.yaml").write_text(f"{text}\n")
    with pytest.raises(ConfigError, match=rf"mine.yaml {message}"):
        cluster_files.choose(["cluster=mine"], [tmp_path])
    (tmp_path / "cluster/mine.yaml").write_text("kind: ssh\nnodes: 2\n")
    with pytest.raises(ConfigError, match=r"^nodes: ssh has no such setting; choose cluster="):
        cluster_files.choose(["cluster=mine"], [tmp_path])


def test_a_record_hides_a_secret_variable_in_both_forms_of_env():
    """A process that was started by hand records this line."""
    line = secrets.command_line("launch", ["--env=KEY=hunter2", "--env", "KEY=hunter2"])
    assert line == "python -m hvtrain launch '--env=KEY=***' --env 'KEY=***'"


def test_attempts_are_numbered_after_the_last_one(tmp_path):
    (tmp_path / "attempt-0003").mkdir()
    assert restart._attempt_folder(tmp_path).name == "attempt-0004"
