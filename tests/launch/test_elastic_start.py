"""The start of an elastic job: its hosts are waited for, with a word, and not for ever. And a large job's over Gloo."""

import sys
from types import SimpleNamespace

import pytest
from horovod.runner import launch

from hvtrain.errors import ConfigError
from hvtrain.launch import horovod_launcher
from hvtrain.launch.horovod_changes import give_gloo_time
from launching import run

SCRIPT = "--host-discovery-script ./hosts.sh failed:"
WAITED = "waited 3 s (--elastic-timeout) for 2 slots (-np), and ./hosts.sh lists"
WAITS = "hvtrain: waiting for 2 slots (-np), and ./hosts.sh lists"
WORDS = [
    "--gloo",
    "-np",
    "2",
    "--min-np",
    "1",
    "--elastic-timeout",
    "3",
    "--host-discovery-script",
    "./hosts.sh",
    "true",
]


@pytest.fixture
def discovery(tmp_path, monkeypatch):
    """Writes the body of the host discovery script."""
    monkeypatch.chdir(tmp_path)

    def write(body):
        (tmp_path / "hosts.sh").write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / "hosts.sh").chmod(0o755)

    return write


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (
            "exit 3",
            f"{SCRIPT} Failed to execute discovery script: ./hosts.sh. Exit code: 3; it must print a line HOST:SLO",
        ),
        (
            "echo a:b:c",
            f"{SCRIPT} too many values to unpack (expected 2); it must print a line HOST:SLOTS",
        ),
        ("echo localhost:1", f"{WAITED} localhost:1; make hosts available, or lower -np"),
        ("true", f"{WAITED} no host; make hosts available, or lower -np"),
    ],
)
def test_hosts_that_do_not_come(discovery, monkeypatch, capsys, body, message):
    discovery(body)
    seconds = [0]
    clock = SimpleNamespace(
        monotonic=lambda: seconds[0], sleep=lambda more: seconds.append(seconds.pop() + more)
    )
    monkeypatch.setattr(horovod_launcher, "time", clock)
    monkeypatch.setattr(sys, "argv", ["horovodrun", *WORDS])
    with pytest.raises(ConfigError) as error:
        horovod_launcher.prepare_elastic(launch.parse_args())
    assert str(error.value).startswith(message)
    assert capsys.readouterr().err.count(WAITS) == ("waited" in message)


@pytest.mark.parametrize(
    ("ranks", "limit", "seconds", "announced"),
    [(100, None, None, ""), (400, None, 40, ""), (400, 45, 45, ""), (1000, None, 250, "2 min 5 s")],
)
def test_many_ranks_have_time_to_meet_over_gloo(
    ranks, limit, seconds, announced, monkeypatch, capsys
):
    monkeypatch.delenv("HOROVOD_GLOO_TIMEOUT_SECONDS", raising=False)
    args = SimpleNamespace(num_proc=ranks, gloo_timeout_seconds=limit)
    give_gloo_time(args)
    assert args.gloo_timeout_seconds == seconds
    line = f"horovodrun: 1,000 ranks may take {announced} to meet over Gloo"
    assert capsys.readouterr().err.startswith(line if announced else "")


@pytest.mark.distributed
def test_a_job_without_hosts_ends_with_one_line(discovery, tmp_path):
    discovery("echo localhost:1")
    code, output = run(None, 1, "horovodrun", *WORDS, cwd=tmp_path)
    # On a busy machine the script may take so long that the time is up before the first line.
    *waits, last = output.splitlines()
    assert code == 2 and all(line.startswith(WAITS) for line in waits), output
    assert last.startswith(f"horovodrun: {WAITED} localhost:1"), output
