"""The script for hosts runs, with a `docker` that says what it was given; Compose itself reads the compose file."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from hvtrain.config.validate import typed
from hvtrain.errors import ConfigError
from hvtrain.launch.cluster_files import submission, texts
from hvtrain.launch.cluster_kinds import Docker
from hvtrain.launch.job import Job, parse_hosts

BIN = Path(sys.executable).parent
WORDS = (
    "python",
    "-m",
    "hvtrain",
    "callbacks=[a,b]",
    '+x=it\'s $(HOME) $HOME ${HOME} $$ "q"',
    "a: b #c",
)
ENVIRONMENT = {"TF_FLAGS": "a 'b' $c ${d} \"e\": {f}"}
HOSTS = Job(WORDS, 4, parse_hosts("s1:2,s2:1,s3:1"), environment=ENVIRONMENT)
SETTINGS = Docker(keys="/keys of mine", data="/data", runs="/home/me/it's")


def files(job, settings):
    return texts(settings, job)


def said(tmp_path, text, *arguments):
    """Runs the script; its `docker` writes its arguments down, one by one."""
    (tmp_path / "docker").write_text("#!/bin/bash\nprintf '%s\\0' \"$@\"\n")
    (tmp_path / "docker").chmod(0o755)
    (tmp_path / "script").write_text(text)
    return subprocess.run(
        ["bash", str(tmp_path / "script"), *arguments],
        env={"PATH": f"{tmp_path}:/usr/bin:/bin", "HOME": "/nowhere"},
        capture_output=True,
        text=True,
        check=False,
    )


def test_each_host_starts_its_part(tmp_path):
    text = files(HOSTS, SETTINGS)["docker-run.sh"]
    first = said(tmp_path, text, "s1").stdout.split("\0")[:-1]
    image = first.index("hvtrain")
    options, line = first[:image], first[image + 1 :]
    assert tuple(line) == (
        *("horovodrun", "--gloo", "--ssh-port", "2222", "-np", "4", "-H", "s1:2,s2:1,s3:1"),
        *WORDS,
    )
    common = [
        "run",
        "--rm",
        "--init",
        "--network=host",
        "--ipc=host",
        "--ulimit",
        "memlock=-1",
        "--gpus",
        "all",
    ]
    assert options[: len(common)] == common
    assert "/keys of mine:/home/hvtrain/.ssh:ro" in options
    assert "/home/me/it's:/home/hvtrain/runs" in options
    assert options[options.index("-e") + 1] == f"TF_FLAGS={ENVIRONMENT['TF_FLAGS']}"
    for host in ("s2", "s3"):
        worker = said(tmp_path, text, host).stdout.split("\0")[:-1]
        assert worker[-3:] == ["hvtrain", "worker", "2222"]
        assert "-e" not in worker
    unknown = said(tmp_path, text, "s4")
    assert (unknown.returncode, unknown.stdout) == (2, "")
    assert "s1 s2 s3" in unknown.stderr


def test_one_host_needs_no_ssh(tmp_path):
    text = files(Job(WORDS, 4), Docker(gpus=False))["docker-run.sh"]
    arguments = said(tmp_path, text).stdout.split("\0")[:-1]
    assert arguments[arguments.index("horovodrun") :] == [
        "horovodrun",
        "--gloo",
        "-np",
        "4",
        *WORDS,
    ]
    assert "--gpus" not in arguments and not any(".ssh" in argument for argument in arguments)


@pytest.mark.parametrize("job", [HOSTS, Job(WORDS, 4)], ids=["hosts", "one host"])
def test_shellcheck_finds_nothing(tmp_path, job):
    shellcheck = shutil.which("shellcheck", path=f"{BIN}:{os.environ['PATH']}") or pytest.skip(
        "no shellcheck here"
    )
    (tmp_path / "script").write_text(files(job, SETTINGS)["docker-run.sh"])
    # SC2016: words that hold a dollar are meant to.
    checked = subprocess.run(
        [shellcheck, "-e", "SC2016", "script"], cwd=tmp_path, capture_output=True, text=True
    )
    assert checked.returncode == 0, checked.stdout


def as_compose_reads(text):
    return text.replace("$$", "$")


def test_two_containers_try_a_job_out():
    tree = yaml.safe_load(files(HOSTS, SETTINGS)["compose.yaml"])
    first, second = tree["services"]["s1"], tree["services"]["s2"]
    line = [as_compose_reads(argument) for argument in first["command"]]
    assert line == [
        "horovodrun",
        "--gloo",
        "--ssh-port",
        "2222",
        "-np",
        "2",
        "-H",
        "s1:1,s2:1",
        *WORDS,
    ]
    assert {
        name: as_compose_reads(value) for name, value in first["environment"].items()
    } == ENVIRONMENT
    assert first["depends_on"]["s2"]["condition"] == "service_healthy"
    assert first["volumes"] == second["volumes"] == ["home:/home/hvtrain", "/data:/data:ro"]
    command = ["docker", "compose", "--file", "a b/compose.yaml", "up", "--exit-code-from", "s1"]
    assert submission(SETTINGS, Path("a b")) == command


def compose_config(tmp_path, text):
    """What Compose makes of the file; it needs no engine for that."""
    compose = shutil.which("docker-compose") or pytest.skip(
        "no docker-compose here (apt-get install docker-compose)"
    )
    (tmp_path / "compose.yaml").write_text(text)
    return subprocess.run(
        [compose, "config"], cwd=tmp_path, capture_output=True, text=True, check=False
    )


def test_compose_takes_the_file(tmp_path):
    text = files(HOSTS, SETTINGS)["compose.yaml"]
    read = compose_config(tmp_path, text)
    assert read.returncode == 0, read.stderr
    # Compose writes each dollar doubled again, so that its output can be read as its input.
    service = yaml.safe_load(read.stdout)["services"]["s1"]
    assert [as_compose_reads(argument) for argument in service["command"]][-len(WORDS) :] == list(
        WORDS
    )
    misspelt = compose_config(tmp_path, text.replace("healthcheck:", "healthchecks:"))
    assert misspelt.returncode != 0


def test_the_containers_make_one_key_pair_and_keep_it(tmp_path):
    """The waiting container's own line runs, twice, in a home of the test's, with an entry point that only speaks."""
    if not shutil.which("ssh-keygen"):
        pytest.skip("no ssh-keygen here")
    tree = yaml.safe_load(files(HOSTS, SETTINGS)["compose.yaml"])
    (tmp_path / "entry").write_text('#!/bin/bash\necho "$@"\n')
    (tmp_path / "entry").chmod(0o755)
    home = tmp_path / "home"
    home.mkdir()
    *_, line = tree["services"]["s2"]["command"]
    line = line.replace("/home/hvtrain", str(home)).replace(
        "/opt/hvtrain/scripts/docker-entrypoint", str(tmp_path / "entry")
    )
    keys = []
    for _ in range(2):
        ran = subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=True)
        assert ran.stdout == "worker 2222\n"
        keys.append((home / ".ssh" / "id_ed25519").read_text())
        assert (home / ".ssh" / "authorized_keys").read_text() == (
            home / ".ssh" / "id_ed25519.pub"
        ).read_text()
    assert keys[0] == keys[1]
    assert (home / ".ssh").stat().st_mode & 0o777 == 0o700


def test_no_key_and_no_value_that_was_not_asked_for():
    texts = json.dumps(files(Job(WORDS, 1), Docker()))
    assert "PRIVATE" not in texts and "TF_FLAGS" not in texts


@pytest.mark.parametrize(
    ("job", "settings", "message"),
    [
        (HOSTS, {}, r"several hosts need ssh keys; .*cluster\.keys="),
        (HOSTS, {"keys": "keys"}, "cluster.keys=keys is not a folder"),
        (HOSTS, {"keys": "/k", "data": "/a:b"}, "cluster.data=/a:b is not a folder"),
        (Job(WORDS, 9, parse_hosts("s1:2")), {}, "-np 9 needs as many slots"),
        (Job(WORDS, 2, min_ranks=1), {}, "does not take --min-np"),
    ],
)
def test_what_cannot_start_is_refused_in_one_line(job, settings, message):
    with pytest.raises(ConfigError, match=message) as error:
        files(job, typed(Docker, settings, "cluster."))
    assert "\n" not in str(error.value)
