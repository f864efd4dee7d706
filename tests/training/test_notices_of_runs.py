"""Runs of two ranks say how they end, once, and none of their files and lines has the secret of an address."""

import os
import re

import pytest

from launching import ROOT, many_runs, run
from receivers import SECRET, free_port, receiving

pytest.importorskip("apprise", reason="apprise is not installed; ./scripts/run pytest does it")
pytest.importorskip("aiosmtpd", reason="aiosmtpd is not installed; ./scripts/run pytest does it")
# By default test_notice.py holds what is sent, by whom, and that it has no secret.
pytestmark = pytest.mark.distributed
nightly, release = pytest.mark.nightly, pytest.mark.release

HOST = os.uname().nodename


@pytest.fixture(scope="module")
def received():
    with receiving() as server:
        yield server


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("notices")


@pytest.fixture(scope="module")
def ran(folder, received):
    """(what each rank saw of each run, all output), in one start of two ranks."""
    short = ["train.epochs=1", "train.batch_size=16"]
    runs = {
        "whole": [*short, f'notify=["{received.mail}","{received.webhook}"]', "run.report=true"],
        "variable": short,
        "limited": [*short, "train.max_time=0.001s"],
        "unsent": [*short, f"notify=json://me:{SECRET}@127.0.0.1:{free_port()}"],
        "unknown": [*short, f"notify=[json://127.0.0.1,nosuch://{SECRET}/x]"],
    }
    return many_runs("mpi", 2, runs, folder, HVTRAIN_NOTIFY=received.webhook)


def with_secret(folder):
    return [
        path
        for path in folder.rglob("*")
        if path.is_file() and SECRET.encode() in path.read_bytes()
    ]


@nightly
@pytest.mark.usefixtures("ran")
def test_a_finished_run_sends_its_results_by_mail_and_webhook(received, folder):
    kind, body = received.only_post("whole has finished")
    assert kind == "success"
    assert re.fullmatch(
        rf"test_loss [\d.]+, test_accuracy [\d.]+; [\d.]+ s on 2 rank\(s\)\n{folder}/whole on {HOST}",
        body,
    )
    ((subject, text),) = received.mails
    assert subject == "whole has finished" and "test_accuracy" in text


@nightly
@pytest.mark.usefixtures("ran")
def test_addresses_come_from_the_variable_too(received):
    assert received.only_post("variable has finished")[0] == "success"
    titles = [title.split()[0] for _, title, _ in received.posts]
    assert sorted(titles) == ["limited", "variable", "whole"], (
        "one of each, and the setting comes first"
    )


@nightly
def test_a_run_that_reaches_its_time_limit_says_how_it_goes_on(ran, received, folder):
    assert ran[0][0]["limited"]["record"]["num_steps"] < 25
    kind, body = received.only_post("limited was stopped")
    assert kind == "warning" and body.startswith("stopped by train.max_time=0.001s after step ")
    assert f"; run the same command with run.dir={folder / 'limited'} to continue\n" in body


@nightly
def test_what_cannot_be_sent_is_one_warning(ran):
    results, output = ran
    assert [seen["unsent"]["record"]["num_steps"] for seen in results] == [12, 12]
    (line,) = [line for line in output.splitlines() if "the notice could not be sent" in line]
    assert line.endswith(
        "could not be sent to address 1 of 1 (json://***); test the address with the command apprise"
    )


@nightly
def test_an_unknown_address_ends_all_ranks_before_training(ran, folder):
    assert {seen["unknown"]["error"] for seen in ran[0]} == {
        "ConfigError: notify: address 2 of 2 (nosuch://***) is not an address that apprise supports; "
        "see docs/notices.md"
    }
    assert not (folder / "unknown").exists()


@nightly
def test_no_secret_is_in_a_run_folder_or_on_the_console(ran, folder):
    assert SECRET not in ran[1]
    files = {path.name for path in (folder / "whole").rglob("*")}
    assert {"config.yaml", "result.json", "starts.json", "report.html", "rank-0000.log"} <= files
    assert [
        leak
        for name in ("whole", "variable", "unsent", "unknown")
        for leak in with_secret(folder / name)
    ] == []


FATES = {
    "failing": ["+callbacks.own._target_=leaves.Fails", "+callbacks.own.batch=3"],
    "killed": ["+callbacks.own._target_=strike.Strike", "+callbacks.own.done=done", "+callbacks.own.step=3"],
    "preempted": ["+callbacks.own._target_=strike.Strike", "+callbacks.own.done=done", "+callbacks.own.step=3",
                  "+callbacks.own.name=SIGTERM"],
    "hanging": ["+callbacks.own._target_=strike.Strike", "+callbacks.own.done=done", "+callbacks.own.step=3",
                "+callbacks.own.name=SIGSTOP", "watchdog.abort_seconds=3"],
}  # fmt: skip
# A launcher, what happens, and the rank to which it does.
NIGHTLY = [
    ("--gloo", "hanging", 1),
    ("--gloo", "failing", 1),
    ("--gloo", "killed", 0),
    ("--mpi", "killed", 1),
    ("--mpi", "preempted", 1),
]
RELEASE = [
    ("--gloo", "failing", 0),
    ("--gloo", "killed", 1),
    ("--gloo", "preempted", 1),
    ("--mpi", "failing", 1),
    ("--mpi", "failing", 0),
    ("--mpi", "killed", 0),
]


@pytest.mark.parametrize(
    ("how", "fate", "rank"),
    [
        *(pytest.param(*case, marks=nightly) for case in NIGHTLY),
        *(pytest.param(*case, marks=release) for case in RELEASE),
    ],
)
def test_a_job_that_is_struck_sends_one_notice(how, fate, rank, received, tmp_path):
    name = f"{fate}-{rank}{how}"
    settings = [
        "model=mlp",
        *FATES[fate],
        f"+callbacks.own.rank={rank}",
        f"notify={received.webhook}",
        "run.report=false",
    ]
    code, output = run(
        None, 1, "python", "-m", "hvtrain", "launch", how, "-np", "2", "--", *settings, f"run.dir={name}", cwd=tmp_path,
        PYTHONPATH=os.pathsep.join([str(ROOT / "tests/support/own"), str(ROOT / "tests/support/launched"),
                                    os.environ.get("PYTHONPATH", "")]),
    )  # fmt: skip
    expected, title, kind, text = {
        "failing": (
            1,
            "has failed",
            "failure",
            f"rank {rank} on {HOST} failed: RuntimeError: a leaf fell off",
        ),
        "preempted": (
            75,
            "was stopped",
            "warning",
            f"stopped by SIGTERM to rank 1 on {HOST} after step ",
        ),
        "hanging": (75, "has failed", "failure", "no progress for "),
        "killed": (
            75,
            "has failed",
            "failure",
            f"rank 1 on {HOST} is gone (killed, or its host is lost)",
        )
        if rank
        else (
            75,
            "has ended for an unknown reason",
            "failure",
            "rank 0 was killed, by its launcher or otherwise; run the same",
        ),
    }[fate]
    assert code == expected, output
    title_shown, body = received.only_post(f"{name} {title}")
    assert title_shown == kind and body.startswith(text), body
    assert len([title for _, title, _ in received.posts if title.startswith(name)]) == 1
    assert SECRET not in output and with_secret(tmp_path) == []
