"""Runs on several hosts, which are a lab's: nothing is shared between them but the code."""

import hashlib
import json
import re
import shlex
import shutil

import pytest
from PIL import Image

from lab import PYTHON, Lab, needs_lab
from launching import BIN, ROOT, WORKERS

pytestmark = [pytest.mark.distributed, needs_lab]
nightly, release = pytest.mark.nightly, pytest.mark.release

CLASSES = {"dark": 40, "bright": 200}
HOW = {"gloo": ["--gloo"], "mpi": ["--mpi"], "mpirun": ["--mpirun"]}


@pytest.fixture(scope="module")
def lab():
    """Four hosts, each with its own copy of a small folder of images in its home."""
    with Lab(4) as made:
        for host in ("s1", "s2", "s3", "s4"):
            for split, count in (("train", 64), ("test", 8)):
                for name, level in CLASSES.items():
                    folder = made.of(host) / "images" / split / name
                    folder.mkdir(parents=True)
                    for number in range(count):
                        Image.new("L", (6, 6), level + number % 16).save(
                            folder / f"{number:03d}.png"
                        )
        yield made


def words(lab, run, *more):
    return ["model=mlp", "dataset=image_folder", f"dataset.dir={lab.home}/images", "dataset.image_shape=[6,6,1]",
            "train.batch_size=8", "train.deterministic=true", "data.uneven=trim",
            f"run.dir={lab.home}/{run}", *more]  # fmt: skip


def checksum(folder):
    return hashlib.sha256((folder / "state.safetensors").read_bytes()).hexdigest()


@pytest.fixture(scope="module")
def uninterrupted(lab):
    """Two epochs on two hosts, over Gloo."""
    code, output = lab.launch(
        "-np", "2", "-H", "s1,s2", "--gloo", "--", *words(lab, "whole", "train.epochs=2")
    )
    assert code == 0, output
    return output


@pytest.mark.nightly
def test_a_run_on_two_hosts(lab, uninterrupted):
    """What rank 0 says, clean; results on s1 alone; the other host has its log, and a note of where they are."""
    lines = uninterrupted.splitlines()
    assert lines[0].startswith("hvtrain ") and lines[0].endswith(": loading TensorFlow ..."), lines[
        0
    ]
    assert lines[1].startswith("versions"), lines[1]
    assert re.search(r"^devices +0 s1 CPU, 1 s2 CPU$", uninterrupted, re.MULTILINE)
    assert "weights equal on 2/2 ranks" in uninterrupted
    assert "stdout>" not in uninterrupted
    run = lab.of("s1") / "whole"
    assert {path.name for path in run.iterdir()} == {
        ".lock", "README.md", "checkpoints", "config.yaml", "curves.png", "history.csv", "kinds.json", "launch", "logs",
        "model.json", "model.keras", "preprocessing", "receipts.jsonl", "report.html", "result.json", "review.json",
        "starts.json",
    }  # fmt: skip
    assert [path.name for path in (run / "logs").iterdir()] == ["rank-0000.log"]
    assert sorted(path.name for path in (run / "launch").iterdir()) == [
        "rank-0000-s1.log",
        "rank-0001-s2.log",
    ]
    assert "Epoch 2/2" in (run / "launch" / "rank-0000-s1.log").read_text()
    there = lab.of("s2") / "whole"
    there_are = [str(path.relative_to(there)) for path in sorted(there.rglob("*"))]
    assert there_are == ["logs", "logs/rank-0001.log", "newest-checkpoint.json"]
    note = json.loads((there / "newest-checkpoint.json").read_text())
    assert (note["step"], note["host"]) == (16, "s1")


@release
def test_a_resume_where_only_the_first_host_has_the_checkpoint(lab, uninterrupted):
    """It travels by broadcast, and the run ends at the bits of the uninterrupted one."""
    line = ["-np", "2", "-H", "s1,s2", "--gloo", "--", *words(lab, "halves")]
    code, output = lab.launch(*line, "train.epochs=1")
    assert code == 0, output
    assert not list(lab.of("s2").glob("halves/checkpoints/*"))
    code, output = lab.launch(*line, "train.epochs=2")
    assert code == 0, output
    assert re.search(r"^resumed +step-00000008", output, re.MULTILINE), output
    whole, halves = (
        lab.of("s1") / run / "checkpoints" / "step-00000016" for run in ("whole", "halves")
    )
    assert checksum(whole) == checksum(halves)


@release
@pytest.mark.parametrize(
    ("how", "hosts", "places"),
    [
        ("mpi", "s1:1,s2:1", "0 s1 CPU, 1 s2 CPU"),
        ("mpirun", "s1:1,s2:1", "0 s1 CPU, 1 s2 CPU"),
        ("gloo", "s1:2,s2:2", "0-1 s1 CPU, 2-3 s2 CPU"),
        ("mpirun", "s1:2,s2:2", "0-1 s1 CPU, 2-3 s2 CPU"),
        ("mpi", "s1:1,s2:1,s3:1,s4:1", "0 s1 CPU, 1 s2 CPU, 2 s3 CPU, 3 s4 CPU"),
    ],
)
def test_a_run_under_each_launcher(lab, how, hosts, places):
    """Over Gloo on two hosts it is test_a_run_on_two_hosts. Each night test_ctrl_c trains over MPI, and
    test_another_user_port_and_key sums under mpirun.
    """
    run, size = f"{how}-{hosts.count(',')}", sum(int(host[-1]) for host in hosts.split(","))
    code, output = lab.launch(
        "-np", str(size), "-H", hosts, *HOW[how], "--", *words(lab, run, "train.epochs=1")
    )
    assert code == 0, output
    assert re.search(rf"^devices +{places}$", output, re.MULTILINE), output
    assert f"(Horovod on {'Gloo' if how == 'gloo' else 'MPI'})" in output
    assert f"weights equal on {size}/{size} ranks" in output
    assert json.loads((lab.of("s1") / run / "result.json").read_text())["num_ranks"] == size
    for host in ("s2", "s3", "s4"):
        assert not {path.name for path in lab.of(host).glob(f"{run}/*")} - {
            "logs",
            "newest-checkpoint.json",
        }


@pytest.mark.parametrize(
    "how", [pytest.param("gloo", marks=nightly), pytest.param("mpi", marks=release)]
)
def test_local_ranks_are_pinned_per_host(lab, how):
    """Each host shows its own GPUs, which are only said to be there."""
    code, output = lab.launch(
        "-np", "4", "-H", "s1:2,s2:2", *HOW[how], "--env", "FAKE_GPUS=2", "--",
        "python", str(WORKERS / "fake_gpus.py"),
    )  # fmt: skip
    assert code == 0, output
    devices = re.findall(r"rank (\d) host (s\d) local (\d) device (GPU \d)", output)
    assert sorted(devices) == [
        ("0", "s1", "0", "GPU 0"), ("1", "s1", "1", "GPU 1"), ("2", "s2", "0", "GPU 0"), ("3", "s2", "1", "GPU 1")
    ]  # fmt: skip


ARGUMENTS = ["a b", "it's $HOME", "-h", ""]


def test_horovodrun_alone_with_nothing_activated(lab):
    """A variable that the user names travels, but not what belongs to this host; words arrive as they were; and the
    code of a rank comes back.
    """
    program = (
        "import os, socket, sys; "
        "print(os.environ['MINE'], os.environ['HOME'], 'SSH_AUTH_SOCK' in os.environ, socket.gethostname(), "
        "sys.argv[1:], flush=True); "
        "sys.exit(7 * int(os.environ['HOROVOD_RANK']))"
    )
    code, output = lab.run(
        "s1", "env", "MINE=yes", "HVTRAIN_ENV=MINE", "SSH_AUTH_SOCK=/nowhere",
        BIN / "horovodrun", "--gloo", "-np", "2", "-H", "s1:1,s2:1", "python", "-c", program, *ARGUMENTS,
    )  # fmt: skip
    assert code == 7, output
    assert f"[1]<stdout>:yes {lab.home} False s2 {ARGUMENTS}\n" in output, output


@pytest.mark.parametrize("how", ["mpi", pytest.param("gloo", marks=release)])
def test_words_arrive_as_they_were_and_the_code_of_a_rank_comes_back(lab, how):
    program = "import sys; print(sys.argv[1:], 1, 2, flush=True); sys.exit(7)"
    code, output = lab.launch(
        "-np", "2", "-H", "s1,s2", f"--{how}", "--", "python", "-c", program, *ARGUMENTS
    )
    assert code == 7, output
    assert f"{ARGUMENTS} 1 2\n" in output


def places(lab, *options, first="s1"):
    """Starts a quick program on each rank; what each said."""
    return lab.run(
        first,
        PYTHON,
        "-m",
        "hvtrain",
        "launch",
        *options,
        "--",
        "python",
        str(WORKERS / "places.py"),
    )


PLACES = [("0", "1", "0", "s1"), ("1", "1", "0", "s2")]


def said(output):
    return sorted(re.findall(r"rank (\d) sum (\d) local (\d) host (s\d)", output))


@release
def test_interfaces_of_other_names(lab):
    """eth0 here, ens5 there; and docker0, with the same address on each, is left out."""
    rename = "ip link set eth0 down; ip link set eth0 name ens5; ip link set ens5 up"
    lab("exec", "s2", "bash", "-c", rename)
    try:
        for how in ("gloo", "mpi", "mpirun"):
            code, output = places(lab, "-np", "2", "-H", "s1,s2", f"--{how}")
            assert (code, said(output)) == (0, PLACES), output
            if how == "gloo":
                assert sorted(re.findall(r"over (\w+)", output)) == ["ens5", "eth0"]
    finally:
        lab(
            "exec",
            "s2",
            "bash",
            "-c",
            rename.replace("eth0", "x").replace("ens5", "eth0").replace("x", "ens5"),
        )
    code, output = places(lab, "-np", "2", "-H", "s1,s2", "--gloo", "--network-interfaces", "eth0")
    assert (code, said(output)) == (0, PLACES), output


@nightly
def test_another_user_port_and_key():
    """On port 2222 each host lets in trainer alone, with a key that lies in no usual place."""
    with Lab(2, "--port", "2222") as lab:
        for host in ("s1", "s2"):
            shutil.move(lab.of(host) / ".ssh" / "id_ed25519", lab.of(host) / "key")
            (lab.of(host) / ".ssh" / "config").write_text("Host s1 s2\n  User trainer\n")
        code, output = places(lab, "-np", "2", "-H", "s1,s2")
        assert code == 2 and "nothing answers ssh on host s2, port 22" in output
        code, output = places(lab, "-np", "2", "-H", "s1,s2", "-p", "2222")
        assert (
            code == 2
            and "does not let you in without a password" in output
            and "ssh-copy-id -p 2222" in output
        )
        reach = ["-np", "2", "-H", "s1,s2", "-p", "2222", "-i", f"{lab.home}/key"]
        who = "import os, socket; print(socket.gethostname(), os.environ['USER'], flush=True)"
        for how in ("gloo", "mpi"):
            code, output = lab.launch(*reach, f"--{how}", "--", "python", "-c", who)
            assert code == 0 and "s2 trainer\n" in output, output
        code, output = places(lab, *reach, "--mpirun")
        assert (code, said(output)) == (0, PLACES), output
        assert "user trainer" in output, "of the rank that came by ssh"


@release
@pytest.mark.parametrize("how", ["gloo", "mpi"])
def test_hierarchical_allreduce(lab, how):
    """On a CPU Horovod has only the hierarchical allgather; with NCCL both settings act. The sums are right."""
    code, output = lab.run(
        "s1", "env", "HOROVOD_HIERARCHICAL_ALLREDUCE=1", "HOROVOD_HIERARCHICAL_ALLGATHER=1",
        PYTHON, "-m", "hvtrain", "launch", "-np", "4", "-H", "s1:2,s2:2", *HOW[how], "--",
        *words(lab, f"hierarchical-{how}", "train.epochs=1"),
    )  # fmt: skip
    assert code == 0, output
    assert "weights equal on 4/4 ranks" in output


def test_hosts_that_cannot_be_reached_are_one_line(lab):
    """Before a rank starts. What is wrong in the words alone is in test_roles.py."""
    keys = lab.of("s4") / ".ssh" / "authorized_keys"
    stopped = "touch /run/no-sshd; kill $(cat /run/sshd.pid)"
    lab("exec", "s3", "bash", "-c", stopped)
    keys.rename(keys.with_name("kept"))
    try:
        for hosts, message in {
            "s1,s9": "host s9 has no IPv4 address here; add it to /etc/hosts or DNS",
            "s1,s3": "nothing answers ssh on host s3, port 22; start sshd there, or give -p PORT",
            "s1,s4": "host s4 does not let you in without a password: Permission denied",
        }.items():
            code, output = lab.launch("-np", "2", "-H", hosts, "--", "model=mlp")
            assert code == 2 and message in output and output.count("\n") == 1, output
    finally:
        keys.with_name("kept").rename(keys)
        lab(
            "exec",
            "s3",
            "bash",
            "-c",
            "rm /run/no-sshd; until ss -ltn | grep -q :22; do sleep 0.05; done",
        )


def test_a_host_without_the_working_folder(lab):
    """Its ranks would start in the home folder, and relative paths mean something else."""
    folder = lab.of("s1") / "only-here"
    folder.mkdir()
    code, output = lab.run(
        "s1",
        "bash",
        "-c",
        f"cd only-here && {PYTHON} -m hvtrain launch -np 2 -H s1,s2 -- model=mlp",
    )
    assert (
        code == 2
        and f"host s2 has no folder {lab.home}/only-here, in which its ranks would start" in output
    ), output


def test_a_host_whose_shell_ends_at_once(lab):
    start_file = lab.of("s2") / ".bashrc"
    start_file.write_text("echo Welcome; exit 0\n")
    code, output = lab.launch("-np", "2", "-H", "s1,s2", "--", "model=mlp")
    start_file.unlink()
    assert code == 2 and "host s2 accepted ssh but did not run the command" in output, output


def test_a_host_without_this_environment(lab):
    """The path of the environment is empty there: as if it had never been made."""
    lab("exec", "s2", "mount", "-t", "tmpfs", "tmpfs", str(BIN))
    try:
        code, output = lab.launch("-np", "2", "-H", "s1,s2", "--", "model=mlp")
    finally:
        lab("exec", "s2", "umount", str(BIN))
    assert code == 2, output
    assert f"host s2 has no {PYTHON}; put hvtrain there, at the same path as here" in output


@release
def test_preemption(lab):
    """SIGUSR1 to the launcher: all ranks save and stop, exit code 75, and the same command resumes."""
    line = [
        "-np",
        "2",
        "-H",
        "s1,s2",
        "--",
        *words(lab, "preempted", "train.validate_every_epochs=null"),
    ]
    signal_it = (
        f"{PYTHON} -m hvtrain launch {shlex.join(line)} train.epochs=100000 & launcher=$!; "
        f"until [ -s {lab.home}/preempted/history.csv ]; do sleep 0.2; kill -0 $launcher || break; done; "
        "kill -USR1 $launcher; wait $launcher; wait $launcher"
    )
    code, output = lab.run("s1", "bash", "-c", signal_it)
    assert code == 75, output
    assert "stopped by SIGUSR1 to rank 0 on s1 after step" in output
    done = json.loads(
        (sorted(lab.of("s1").glob("preempted/checkpoints/step-*"))[-1] / "meta.json").read_text()
    )
    step = int(re.search(r"after step ([\d,]+)", output)[1].replace(",", ""))
    assert not done["ended"]
    code, output = lab.launch(*line, f"train.steps={step + 3}")
    assert code == 0, output
    assert f"step-{step:08d}" in output


@pytest.mark.parametrize(
    "how",
    [pytest.param(how, marks=nightly if how == "mpi" else pytest.mark.release) for how in HOW],
)
def test_ctrl_c_ends_the_ranks_of_all_hosts(lab, how):
    """Exit code 130, and soon no rank is left anywhere: they would train for hours."""
    run = f"{lab.home}/interrupted-{how}"
    line = [
        "-np",
        "2",
        "-H",
        "s1,s2",
        f"--{how}",
        "--",
        *words(lab, f"interrupted-{how}", "train.epochs=100000"),
    ]
    script = (
        f"{PYTHON} -m hvtrain launch {shlex.join(line)} & launcher=$!; "
        f"until [ -s {run}/history.csv ]; do sleep 0.2; kill -0 $launcher || break; done; "
        "kill -INT $launcher; wait $launcher; echo code $?; "
        "left() { ps ax; ssh s2 ps ax; }; "
        "for i in $(seq 500); do left | grep -q '[h]vtrain model=mlp' || break; sleep 0.2; done; echo looked $i times"
    )
    code, output = lab.run("s1", "bash", "-c", script)
    assert code == 0 and "code 130" in output, output
    assert int(re.search(r"looked (\d+) times", output)[1]) < 500, "ranks were left"


@release
@pytest.mark.timeout(900)
def test_the_section_of_the_readme():
    """Its text, on four hosts, with one rank on each: 16 are too many for the cores that there are here."""
    section = (
        (ROOT / "README.md").read_text().partition("\n## Several hosts\n")[2].partition("\n## ")[0]
    )
    (commands,) = re.findall(r"^```\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)
    assert "horovodrun -np 16 -H s1:4,s2:4,s3:4,s4:4 python -m hvtrain\n" in commands
    commands = re.sub(r"(s[1-4]):4", r"\1:1", commands).replace("-np 16", "-np 4")
    before = set((ROOT / "runs").glob("*"))
    with Lab(4) as lab:
        code, output = lab.run("s1", "bash", "-e", "-c", commands, timeout=800, cwd=ROOT)
    assert code == 0, output
    assert "weights equal on 4/4 ranks" in output, output
    assert "0 s1 CPU, 1 s2 CPU, 2 s3 CPU, 3 s4 CPU" in output
    for folder in set((ROOT / "runs").glob("*")) - before:
        shutil.rmtree(folder)
