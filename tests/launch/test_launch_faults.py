"""A launcher over several hosts, when a rank, a host or the launcher itself is really struck down.

What a front makes of each launcher's words is in test_transcripts.py, for all of them by default; a real rank is killed
by default in test_restart.py.
"""

import pytest

from hvtrain.launch.first_failure import AGAIN
from lab import PYTHON, Lab, needs_lab
from launcher_lab import HOW, fate, last_line, left, line, signalled, started, wait_for
from launching import HASTY, finish

pytestmark = [pytest.mark.distributed, needs_lab]

nightly, release = pytest.mark.nightly, pytest.mark.release


@pytest.fixture(scope="module")
def lab():
    with Lab(3) as made:
        yield made


# One for each transport and for each fate; test_transcripts.py has what all launchers print.
NIGHTLY = [
    ("launch-gloo", "raise", "1"),
    ("horovodrun-mpi", "SIGKILL", "0"),
]
RELEASE = [
    ("launch-mpi", "SIGKILL", "1"),
    ("launch-mpirun", "SIGKILL", "0"),
    ("horovodrun-gloo", "SIGKILL", "1"),
    *((how, "raise", "0") for how in HOW),
    *((how, "SIGKILL", "0") for how in ("launch-gloo", "launch-mpi", "horovodrun-gloo")),
    ("launch-gloo", "SIGKILL", "1"),
    ("launch-mpirun", "exit7", "1"),
    ("horovodrun-mpi", "raise", "1"),
]


@pytest.mark.parametrize(
    ("how", "what", "rank"),
    [
        *(pytest.param(*case, marks=nightly) for case in NIGHTLY),
        *(pytest.param(*case, marks=release) for case in RELEASE),
    ],
)
def test_a_rank_that_fails(lab, tmp_path, how, what, rank):
    """The last line names rank, host and cause; the code says whether a restart can help; nothing is left anywhere.

    Horovod's own launcher on Gloo would start a rank in the third host's slot too.
    """
    # Else MPI's own farewell waits for the others.
    mpi = ["mpi"] if "mpi" in how and what == "SIGKILL" else []
    code, output = lab.run("s1", *line(how, "s1:1,s2:1,s3:1", *fate(tmp_path, what, rank, *mpi)))
    expected, cause = {
        "SIGKILL": (75, f"killed by SIGKILL; {AGAIN}"),
        "raise": (1, "ValueError: a bad thing; see its traceback above"),
        "exit7": (7, "ended with exit code 7; see its output above"),
    }[what]
    assert code == expected, output
    assert (
        last_line(output) == f"hvtrain: FIRST FAILURE rank {rank} host s{int(rank) + 1}: {cause}"
    ), output
    assert output.count("Traceback (most recent call last)") == (what == "raise"), output
    assert "Primary job" not in output and "HOROVOD_RANK" not in output
    assert not (tmp_path / "rank-2").exists() and not left(lab)


@pytest.mark.parametrize(
    ("how", "hosts"),
    [
        pytest.param("launch-gloo", "s2:2", marks=nightly),
        pytest.param("horovodrun-mpi", "s1:1,s2:1", marks=release),
        pytest.param("launch-mpirun", "s2:2", marks=release),
        pytest.param("horovodrun-gloo", "s1:1,s2:1", marks=release),
    ],
)
def test_sigterm_is_a_preemption(lab, tmp_path, how, hosts):
    """The ranks are told to save, also where all of them are on another host; code 75."""
    code, output = signalled(lab, line(how, hosts, *fate(tmp_path, "wait", "0")), tmp_path, "TERM")
    assert (code, last_line(output)) == (75, f"hvtrain: preempted after saving; {AGAIN}"), output
    assert not left(lab)


@nightly
def test_a_second_sigterm_ends_by_force(lab, tmp_path):
    """Ranks that do not hear are killed, and mpirun with them; the memory that they shared is given back."""
    command = line("launch-mpi", "s1:2", *fate(tmp_path, "deaf", "0", "mpi"))
    code, output = signalled(lab, command, tmp_path, "TERM", "TERM")
    assert (code, last_line(output)) == (75, f"hvtrain: ended by force after SIGTERM; {AGAIN}"), (
        output
    )
    assert not left(lab)


@release
def test_some_time_after_sigterm_all_is_ended_by_force(lab, tmp_path):
    """Half a minute, here two seconds."""
    command = line("horovodrun-gloo", "s1:1,s2:1", *fate(tmp_path, "deaf", "0"))
    hasty = [PYTHON, str(HASTY / "module.py"), "hvtrain.launch.supervisor:SECONDS_TO_SAVE=2", "--"]
    command = [*hasty, "hvtrain.launch.horovodrun:main", *command[1:]]
    code, output = signalled(lab, command, tmp_path, "TERM")
    assert (code, last_line(output)) == (75, f"hvtrain: ended by force after SIGTERM; {AGAIN}"), (
        output
    )
    assert not left(lab)


@pytest.mark.parametrize(
    "how",
    [pytest.param("horovodrun-gloo", marks=nightly), pytest.param("launch-mpi", marks=release)],
)
def test_kill_of_the_launcher_ends_its_ranks(lab, tmp_path, how):
    """They are Python alone, which notices nothing by itself; what follows is the launchers' doing."""
    code, output = signalled(
        lab, line(how, "s1:1,s2:1", *fate(tmp_path, "deaf", "0")), tmp_path, "KILL"
    )
    assert code == 137, output
    assert not left(lab)


@pytest.mark.parametrize(
    ("trouble", "how"),
    [
        pytest.param("cut", "horovodrun-mpi", marks=nightly),
        pytest.param("stop", "launch-gloo", marks=release),
        pytest.param("stop", "horovodrun-mpi", marks=release),
        pytest.param("cut", "launch-gloo", marks=release),
    ],
)
def test_a_host_that_is_lost(tmp_path, how, trouble):
    """Its power, or its network for good: the connection is named, and a restart can help."""
    with Lab(2) as lab:
        launched = started(lab, line(how, "s1:1,s2:1", *fate(tmp_path, "wait", "0")))
        wait_for(tmp_path / "rank-1")
        wait_for(tmp_path / "rank-0")
        lab(*(["stop", "s2"] if trouble == "stop" else ["net", "s2", "down"]))
        output = finish(launched)
        assert launched.returncode == 75, output
        assert last_line(output) == (
            "hvtrain: FIRST FAILURE rank 1 host s2: the connection to host s2 was lost; "
            f"check that it is up, then {AGAIN}"
        )
        assert not left(lab, ("s1",))


@release
def test_a_rank_killed_for_lack_of_memory(lab, tmp_path):
    """The kernel's own killer, in a group of processes with little memory; a restart cannot help."""
    groups = "/sys/fs/cgroup/memory"
    script = (
        f"import os, time, pathlib\n"
        f"if os.environ['HOROVOD_RANK'] == '1':\n"
        f"    group = pathlib.Path('{groups}/{lab.name}'); group.mkdir(exist_ok=True)\n"
        f"    (group / 'memory.limit_in_bytes').write_text('200M')\n"
        f"    (group / 'cgroup.procs').write_text('0')\n"
        f"    held = [bytearray(1 << 20) for _ in range(1000)]\n"
        f"time.sleep(60)\n"
    )
    code, output = lab.run("s1", *line("horovodrun-gloo", "s1:1,s2:1", "python", "-c", script))
    if "Error" in output:
        pytest.skip(f"no group of processes can be made here: {last_line(output)}")
    cause = "killed for lack of memory on s2; lower train.batch_size or use more hosts"
    assert (code, last_line(output)) == (1, f"hvtrain: FIRST FAILURE rank 1 host s2: {cause}"), (
        output
    )
