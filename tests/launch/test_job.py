"""A job's hosts, the variables that travel, the settings and templates of a cluster, and what ranks print."""

import argparse
import ctypes
import os
import re
import shlex
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import yaml

from hvtrain.config.choices import CONFIGS, setting_lines
from hvtrain.errors import ConfigError
from hvtrain.launch import environment
from hvtrain.launch.cluster_files import choose, quote, submission, submit, texts, yaml_text
from hvtrain.launch.cluster_kinds import KINDS, Slurm
from hvtrain.launch.job import (
    Host,
    Job,
    launcher_command,
    mpi_options,
    parse_hostfile,
    parse_hosts,
    place_ranks,
    used_hosts,
)
from hvtrain.launch.output import RankOutput
from hvtrain.launch.remote_hosts import (
    LOADER,
    HostNetwork,
    Ssh,
    answer,
    capture,
    is_local,
    request,
)
from hvtrain.system import host_facts


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("-np 0 true", "^-np 0 is not a whole number of at least 1; give the number of ranks$"),
        (
            "-np two true",
            "^argument -np/--num-proc: invalid int value: 'two'; see horovodrun --help$",
        ),
        ("-np 2", "^the command of the ranks is missing; write it last: python -m hvtrain$"),
        ("-np 2 -np 3 true -np -np", "^-np was given 2 times; give it once$"),
    ],
)
def test_horovodruns_own_options_are_refused_in_one_line(monkeypatch, arguments, message):
    from hvtrain.launch import horovod_launcher

    # It is replaced.
    monkeypatch.setattr(argparse.ArgumentParser, "error", argparse.ArgumentParser.error)
    monkeypatch.setattr("sys.argv", ["horovodrun", *arguments.split()])
    with pytest.raises(ConfigError, match=message):
        horovod_launcher._prepare()


@pytest.mark.parametrize("text", ["", "s1:", "s1:x", "s1:0", "s1 s2", "s1:1,,s2:1", "user@s1:1"])
def test_hosts_that_are_none(text):
    with pytest.raises(
        ConfigError, match="is not a host and a number of ranks; write -H s1:4,s2:4"
    ):
        parse_hosts(text)


def test_a_host_twice():
    with pytest.raises(ConfigError, match="s1 is listed 2 times"):
        parse_hosts("s1:1,s2:1,s1:2")


def test_a_hostfile(tmp_path):
    path = tmp_path / "hosts"
    path.write_text("# ours\ns1 slots=4\n\ns2   slots = 2 # the old one\n10.0.0.3\n")
    assert parse_hostfile(path) == (Host("s1", 4), Host("s2", 2), Host("10.0.0.3", 1))
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        parse_hostfile(tmp_path / "none")
    # As an editor with another encoding writes it.
    path.write_bytes("# für uns\ns1 slots=4\ns2 4\n".encode("latin-1"))
    line = "hosts: 's2 4' is not a host and a number of ranks; write lines such as: s1 slots=4"
    with pytest.raises(ConfigError, match=line):
        parse_hostfile(path)


@pytest.mark.parametrize(("chosen", "expected"), [(None, "eth0"), ("ib0", "ib0")])
def test_the_users_interface_for_nccl_stays(chosen, expected, monkeypatch):
    from hvtrain.launch import horovod_changes as changes

    monkeypatch.setattr(os, "environ", {"NCCL_SOCKET_IFNAME": chosen} if chosen else {})
    assert f"NCCL_SOCKET_IFNAME={expected}" in mpi_options("10.0.0.0/24", "eth0", Ssh())
    changes._command_without_variables("python train.py", {"NCCL_SOCKET_IFNAME": "eth0", "A": "1"})
    assert (os.environ["NCCL_SOCKET_IFNAME"], os.environ["A"]) == (expected, "1"), (
        "what ranks inherit"
    )


def test_ranks_fill_hosts_one_after_the_other():
    job = Job(("true",), 3, parse_hosts("s1:2,s2:2"))
    assert place_ranks(job) == ("s1", "s1", "s2")
    assert used_hosts(place_ranks(job)) == (Host("s1", 2), Host("s2", 1))
    with pytest.raises(ConfigError, match="-np 5 needs as many slots and -H s1:2,s2:2 has 4"):
        place_ranks(Job(("true",), 5, job.hosts))


def test_which_variables_travel():
    variables = {
        "PATH": "/usr/bin", "TF_CPP_MIN_LOG_LEVEL": "1", "NCCL_DEBUG": "INFO", "HOROVOD_CYCLE_TIME": "0.5",
        "OMP_NUM_THREADS": "2", "PYTHONPATH": "/code", "LANG": "C.UTF-8",
        "HOME": "/root", "SSH_AUTH_SOCK": "/tmp/a", "KRB5CCNAME": "FILE:/tmp/b", "CUDA_VISIBLE_DEVICES": "0",
        "HOROVOD_GLOO_TIMEOUT_SECONDS": "120", "HOROVOD_GLOO_RENDEZVOUS_ADDR": "10.0.0.1",
        "HOROVOD_RANK": "3", "HOROVOD_SECRET_KEY": "x", "CUDA_SSH_KEY": "x",
        "TF_PASSPHRASE": "x", "KERAS_PWD": "x", "TF_API_KEY": "x", "HVTRAIN_PASSWORD": "x",
        "AWS_REGION": "x", "AWS_SECRET_ACCESS_KEY": "x", "EDITOR": "x", "MINE": "yes",
    }  # fmt: skip
    rank_variables = environment.for_ranks(variables, ["MINE", "NEW=a=b"])
    travelling = {
        "TF_CPP_MIN_LOG_LEVEL", "NCCL_DEBUG", "HOROVOD_CYCLE_TIME", "OMP_NUM_THREADS", "PYTHONPATH", "LANG",
        "AWS_REGION", "HOROVOD_GLOO_TIMEOUT_SECONDS",
    }  # fmt: skip
    assert travelling | {"PATH", "MINE", "NEW", "HVTRAIN_ENV"} == rank_variables.keys() - {
        "OPAL_PREFIX"
    }
    assert rank_variables["NEW"] == "a=b"
    launcher = environment.for_launcher(variables, rank_variables)
    assert launcher.keys() - rank_variables.keys() == {
        "HOME",
        "SSH_AUTH_SOCK",
        "KRB5CCNAME",
        "CUDA_VISIBLE_DEVICES",
        "PYTHONUNBUFFERED",
    }
    with pytest.raises(ConfigError, match="--env NONE: no such variable is set here"):
        environment.for_ranks(variables, ["NONE"])
    # The value may be a secret.
    with pytest.raises(
        ConfigError, match=r"^--env: 'A B' is not a variable's name; write .*=VALUE$"
    ):
        environment.parse_env_options(variables, ["A B=hunter2"])
    assert environment.parse_env_options(variables, ["MINE"]) == {"MINE": "yes"}, "and none besides"


def test_settings_keep_their_type_and_texts_stay_texts():
    cluster = choose(["cluster=slurm", "cluster.time=12:00:00", "cluster.gpus_per_rank=0"], [])
    assert (cluster.time, cluster.gpus_per_rank) == ("12:00:00", 0)
    with pytest.raises(
        ConfigError, match=r"unknown setting 'cluster.tme'; did you mean 'cluster.time'\?"
    ):
        choose(["cluster=slurm", "cluster.tme=1"], [])
    with pytest.raises(ConfigError, match=r"cluster.gpus_per_rank=many is not a whole number"):
        choose(["cluster=slurm", "cluster.gpus_per_rank=many"], [])
    with pytest.raises(
        ConfigError, match=r"cluster.time: ssh has no such setting; choose cluster=slurm\|mpijob"
    ):
        choose(["cluster.time=1"], [])
    with pytest.raises(ConfigError, match="write the run's settings after --"):
        choose(["model=cnn"], [])


def test_a_cluster_of_ones_own(tmp_path):
    (tmp_path / "cluster").mkdir()
    (tmp_path / "cluster" / "ours.yaml").write_text(
        "kind: slurm\ntime: '01:00:00'\npartition: gpu\n"
    )
    cluster = choose(["cluster=ours", "cluster.partition=big"], [tmp_path])
    assert (cluster.kind, cluster.time, cluster.partition) == ("slurm", "01:00:00", "big")


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_has_documented_settings(kind):
    lines = setting_lines(KINDS[kind], "cluster.")
    assert lines
    assert all(len(line.split(None, 1)[1]) > 10 for line in lines)


SLURM = Slurm(time="1:00:00")
TRAINING = Job(("python", "-m", "hvtrain"), 2)


def with_template(tmp_path, text):
    (tmp_path / "cluster").mkdir()
    (tmp_path / "cluster" / "hvtrain.sbatch.j2").write_text(text)
    return texts(SLURM, TRAINING, [tmp_path])


def test_a_template_of_ones_own_wins(tmp_path):
    original = (CONFIGS / "cluster" / "hvtrain.sbatch.j2").read_text()
    own = with_template(
        tmp_path,
        original.replace("#SBATCH --requeue\n", "#SBATCH --requeue\n#SBATCH --exclusive\n"),
    )
    assert own == {
        name: text.replace("--requeue\n", "--requeue\n#SBATCH --exclusive\n")
        for name, text in texts(SLURM, TRAINING).items()
    }
    assert choose(["cluster=slurm", "cluster.time=1:00:00"], [tmp_path]) == SLURM


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "\n{{ cluster.tme }}",
            r"hvtrain.sbatch.j2, line 2: .* has no attribute 'tme'; fix the template",
        ),
        ("{% if %}", r"hvtrain.sbatch.j2, line 1: Expected an expression, .*; fix the template"),
        ("{{ nodes / 0 }}", r"hvtrain.sbatch.j2, line 1: division by zero; fix the template"),
    ],
)
def test_what_is_wrong_in_a_template_is_one_line(text, message, tmp_path):
    with pytest.raises(ConfigError, match=message) as error:
        with_template(tmp_path, text)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "text",
    [
        "yes",
        "1e3",
        "",
        " a",
        "a: b #c",
        "'\"\\",
        "\n\t\x07\x7f\x85\u2028",
        "é😀",
        "x" * 500,
        "{{ a }} $ %",
    ],
)
def test_any_text_survives_yaml_and_the_shell(text):
    assert yaml.safe_load(yaml_text(text)) == text and "\n" not in yaml_text(text)
    assert shlex.split(quote(text)) == shlex.split(quote([text])) == [text]


def test_submitting_says_which_program_is_missing(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    for kind, program in {"slurm": "sbatch", "spark": "spark-submit", "docker": "docker"}.items():
        with pytest.raises(
            ConfigError,
            match=f"{program} is not installed here; copy the files to a host that has it",
        ):
            submit(KINDS[kind](), submission(KINDS[kind](), Path("launch")))


def test_mpirun_is_told_the_network_and_every_variable_by_name_alone():
    job = Job(
        ("python", "x.py"),
        2,
        parse_hosts("s1,s2"),
        environment={"MINE": "secret"},
        ssh=Ssh(2222, "key"),
        mpirun=True,
    )
    line = launcher_command(job, HostNetwork("eth0", "ens5,eth0", "10.0.0.0/24", {}))
    text = " ".join(line)
    assert "-x MINE" in text and "secret" not in text
    assert "btl_tcp_if_include 10.0.0.0/24" in text and "oob_tcp_if_include 10.0.0.0/24" in text
    assert any("-p 2222 -i key" in argument for argument in line)
    assert line[-1] == "x.py" and line[-2].endswith("/python")
    own = launcher_command(Job(("python", "x.py", "python"), 1, parse_hosts("s1")))
    assert own[-1] == "python" and own[-3].endswith("/python"), (
        "the first word alone is the program"
    )


def test_what_ranks_print_is_told_apart(tmp_path, capsys):
    output = RankOutput(tmp_path, ["s1", "s2"])
    output.read(
        ["[0]<stdout>:Epoch 1\n", "[1,1]<stderr>:oh no: [1]\n", "[0]<stderr>:hm\n", "mpirun says\n",
         "Process 1 exit with status code 2.\n", "[1]<stdout>:\n"]
    )  # fmt: skip
    shown = capsys.readouterr()
    assert shown.out == "Epoch 1\n"
    assert shown.err == "[rank 1 s2] oh no: [1]\nhm\nmpirun says\n"
    assert (tmp_path / "rank-0000-s1.log").read_text() == "Epoch 1\nhm\n"
    assert (tmp_path / "rank-0001-s2.log").read_text() == "oh no: [1]\n\n"


def test_pieces_of_lines_that_mpirun_marks_are_put_together(tmp_path, capsys):
    output = RankOutput(tmp_path, ["s1", "s2"])
    output.read(
        [
            "[1,0]<stdout>:1[1,1]<stdout>:one[1,0]<stdout>: 2\n",
            "[1,1]<stdout>: two\n",
            "[1,0]<stdout>:no end",
        ]
    )
    shown = capsys.readouterr()
    assert (shown.out, shown.err) == ("1 2\nno end\n", "[rank 1 s2] one two\n")


def test_logs_that_cannot_be_written(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(
        ConfigError,
        match=r"the ranks' logs cannot be written to .*: Not a directory; choose another",
    ):
        RankOutput(tmp_path / "file" / "logs", ["s1"])


SAID = {
    "ssh: Could not resolve hostname s9: Name or service not known": "host s9 has no IPv4 address here",
    "connect to host s9 port 22: Connection refused": "nothing answers ssh on host s9, port 22",
    "root@s9: Permission denied (publickey).": "does not let",
    "connect to host s9 port 22: Connection timed out": r"host s9 cannot be reached \(Connection timed out\)",
    "@ WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED! @\nHost key verification failed.": "ssh-keygen -R s9",
    "": "ssh to host s9 failed: no error message; try: ssh s9 true",
}


@pytest.mark.parametrize("text", SAID)
def test_what_ssh_says_becomes_one_line_with_a_way_out(text):
    explanation = Ssh().explain_failure("s9", text)
    assert re.search(SAID[text], explanation) and "\n" not in explanation


def test_a_call_on_a_host_is_one_line():
    """A login shell such as csh ends a quoted word at a line break, with "Unmatched '"."""
    command = [sys.executable, "-c", LOADER]
    assert "\n" not in shlex.join(command)
    done = capture(command, request((host_facts,), "processor"), 60)
    assert answer(done.stdout) == host_facts.processor()


def test_other_hosts_are_not_this_one_where_any_address_may_be_bound():
    """As with keepalived, which sets net.ipv4.ip_nonlocal_bind: no host was checked, and none was cleaned up."""

    def answers():
        # The namespace is this thread's alone.
        if ctypes.CDLL(None).unshare(0x40000000):  # CLONE_NEWNET
            pytest.skip("a network namespace needs root")
        Path("/proc/sys/net/ipv4/ip_nonlocal_bind").write_text("1")
        return is_local("192.0.2.1"), is_local("127.0.1.1")

    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(answers).result() == (False, True)
