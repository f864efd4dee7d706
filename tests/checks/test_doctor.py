"""python -m hvtrain doctor on a lab of three hosts: each failure is provoked for real, and undone."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from doctor_lab import HOSTS, RIGHT, DoctorLab, emptied, login, names, over
from lab import needs_lab
from launching import ROOT

pytestmark = [pytest.mark.distributed, needs_lab]

HEALTHY = [
    "ssh", "folder", "python", "packages", "code", "horovod", "data set", "shared memory", "open files", "run folder",
    "gpus", "names", "interface", "ports", "clock", "allreduce", "links",
]  # fmt: skip


@pytest.fixture(scope="module")
def lab():
    with DoctorLab(3) as hosts:
        yield hosts


@pytest.fixture
def data(tmp_path):
    """A data set of files."""
    for name in ("train/cat/1.png", "train/dog/2.png"):
        (tmp_path / "data" / name).parent.mkdir(parents=True)
        (tmp_path / "data" / name).write_bytes(name.encode() * 100)
    return tmp_path / "data"


def overrides_of(data):
    return ["dataset=image_folder", f"dataset.dir={data}", f"run.dir={data.parent}/runs/a"]


def site(package):
    """Where the environment has it; nothing is imported."""
    return next(Path(sys.prefix).glob(f"lib/python3*/site-packages/{package}"))


def test_a_host_without_ssh_a_folder_a_file_system(lab, data, tmp_path):
    """s3's sshd is away; s2 has neither the working folder nor the data; s1's disk for the run is small."""
    (tmp_path / "work").mkdir()
    (tmp_path / "runs").mkdir()
    stop = "touch /run/no-sshd; kill $(cat /run/sshd.pid); while ss -ltn | grep -q :22; do sleep 0.05; done"
    start = "rm /run/no-sshd; until ss -ltn | grep -q :22; do sleep 0.05; done"
    with lab.changed(
        ("s3", stop, start),
        emptied("s2", tmp_path),
        emptied("s1", tmp_path / "runs"),
    ):
        report = lab.report(*HOSTS, "--no-links", *overrides_of(data), cwd=tmp_path / "work")
    failures = {
        (row["check"], row["host"]): row["finding"]
        for row in report["rows"]
        if row["status"] == "FAIL"
    }
    assert failures.keys() == {
        ("ssh", "s3"),
        ("folder", "s2"),
        ("data set", "s2"),
        ("run folder", "s1"),
    }, failures
    assert failures["ssh", "s3"] == "nothing answers ssh on host s3, port 22"
    assert failures["folder", "s2"] == f"has no {tmp_path}/work, in which ranks start"
    assert failures["data set", "s2"] == f"{data}: No such file or directory"
    assert "1 MiB free for" in failures["run folder", "s1"]
    assert [row["host"] for row in report["rows"] if row["check"] == "all other"] == ["s3"]


def test_a_run_folder_that_cannot_be_written(lab, data, tmp_path):
    runs = tmp_path / "runs"
    runs.mkdir()
    with lab.changed(("s1", f"mount -t tmpfs -o ro tmpfs {runs}", f"umount {runs}")):
        report = lab.report(*HOSTS, "--no-links", *overrides_of(data), cwd=tmp_path)
    (failed,) = [row for row in report["rows"] if row["status"] == "FAIL"]
    assert (failed["check"], failed["host"]) == ("run folder", "s1")
    assert (
        failed["finding"].endswith("/runs/a cannot be written") and "run.dir=PATH" in failed["fix"]
    )


def test_other_packages_other_code_another_horovod_other_data(lab, data, tmp_path):
    metadata = next(site("keras-*.dist-info").glob("METADATA"))
    (tmp_path / "metadata").write_text(
        re.sub(r"(?m)^Version: .*", "Version: 3.1.4", metadata.read_text())
    )
    (tmp_path / "step_plan.py").write_text(
        "# Another day's.\n" + (ROOT / "hvtrain/core/step_plan.py").read_text()
    )
    library = next(site("horovod/tensorflow").glob("mpi_lib*.so"))
    (tmp_path / "mpi_lib.so").write_bytes(b"GlooContext")
    (tmp_path / "picture").write_bytes(b"another")
    with lab.changed(
        over("s2", tmp_path / "metadata", metadata),
        over("s3", tmp_path / "step_plan.py", ROOT / "hvtrain/core/step_plan.py"),
        over("s2", tmp_path / "mpi_lib.so", library),
        emptied("s3", library.parent),
        over("s3", tmp_path / "picture", data / "train/dog/2.png"),
    ):
        failures = lab.failures(*overrides_of(data))
    assert failures.keys() == {
        ("packages", "s2"), ("code", "s3"), ("horovod", "s2"), ("horovod", "s3"), ("data set", "s3"),
    }, failures  # fmt: skip
    assert re.search(r"^keras 3\.1\.4, s1 3\.\d+\.\d+$", failures["packages", "s2"])
    assert failures["code", "s3"] == "differs from s1 in core/step_plan.py"
    assert failures["horovod", "s2"] == "built with Gloo; on s1 with MPI, Gloo"
    assert failures["horovod", "s3"] == "has no Horovod library for TensorFlow"
    assert failures["data set", "s3"].startswith("differs from s1 in train/dog/2.png")


@pytest.mark.nightly
def test_another_python_and_none(lab):
    own = Path(sys.executable).resolve()
    others = [
        Path(path).resolve()
        for path in ("/usr/bin/python3", "/usr/local/bin/python3")
        if Path(path).exists()
    ]
    versions = {
        path: subprocess.check_output([path, "-V"], text=True).split()[1] for path in others
    }
    other = next((path for path in others if versions[path] != sys.version.split()[0]), None)
    if other is None:
        pytest.skip("this machine has one Python only")
    with lab.changed(over("s2", other, own), emptied("s3", sys.prefix)):
        failures = lab.failures()
    # Another Python of the same minor version finds the packages; one of another does not, and that is said too.
    assert {("python", "s2"), ("python", "s3")} <= failures.keys(), failures
    assert f"Python {versions[other]}; s1 has {sys.version.split()[0]}" in failures["python", "s2"]
    assert failures["python", "s3"] == f"has no {sys.executable}"
    assert {host for _, host in failures} == {"s2", "s3"}
    assert not [check for check, host in failures if host == "s3" and check != "python"]


def test_names(lab):
    with lab.changed(
        names("s2", RIGHT["s1"], "127.0.1.1 s2", RIGHT["s3"]),
        names("s3", RIGHT["s1"], RIGHT["s3"]),
        names("s1", RIGHT["s1"], RIGHT["s2"], RIGHT["s3"]),
        ("s3", "hostname s1", "hostname s3"),
    ):
        report = lab.report(*HOSTS, "--no-links")
    rows = [
        (row["host"], row["finding"], row["fix"])
        for row in report["rows"]
        if row["status"] == "FAIL"
    ]
    assert rows == [
        (
            "s3",
            "has the hostname s1, as s1 does; Horovod would treat them as one host",
            "on s3: hostnamectl set-hostname s3",
        ),
        (
            "s2",
            "resolves s2 to 127.0.1.1 instead of 10.213.0.2",
            "on s2: write '10.213.0.2 s2' into /etc/hosts, or add it to DNS",
        ),
        (
            "s3",
            "has no address for s2",
            "on s3: write '10.213.0.2 s2' into /etc/hosts, or add it to DNS",
        ),
    ]


@pytest.mark.nightly
def test_names_that_lead_elsewhere(lab):
    """ssh knows the way to s3 by its own configuration; all others would take its name for an address it has not."""
    wrong = [RIGHT["s1"], RIGHT["s2"], "10.213.0.33 s3"]
    ssh = "printf 'Host s3\\n HostName 10.213.0.3\\n HostKeyAlias s3\\n' > ~/.ssh/config"
    with lab.changed(
        ("s1", ssh, "rm ~/.ssh/config"),
        names("s1", *wrong),
        names("s2", "10.213.0.1 s1", "10.213.0.22 s2", "10.213.0.33 s3"),
        names("s3", *wrong),
    ):
        failures = lab.failures()
    assert (
        "resolves s3 to 10.213.0.33, but no interface of s3 has that address"
        in failures["names", "s1"]
    )
    assert (
        "resolves s2 to 10.213.0.22 instead of 10.213.0.2 (and 1 more)" in failures["names", "s2"]
    )
    assert {check for check, _ in failures} == {"names"}


@pytest.mark.nightly
def test_interfaces(lab):
    failures = lab.failures("--network-interfaces", "docker0")
    assert (
        failures["interface", "s2"]
        == "docker0 has 172.17.0.1 here and on s1, so it does not connect the hosts"
    )
    failures = lab.failures("--network-interfaces", "ib0")
    assert "has no interface ib0; it has eth0 10.213.0.1" in failures["interface", "s1"]


@pytest.mark.nightly
def test_no_common_network(lab):
    """s2 is reached by a route, in a network of its own."""
    elsewhere = "10.214.0.2 s2"
    address = "ip address add {}/24 dev eth0; ip address delete {}/24 dev eth0;"
    to = f"{address.format('10.214.0.2', '10.213.0.2')} ip route add 10.213.0.0/24 dev eth0"
    back = f"ip route delete 10.213.0.0/24; {address.format('10.213.0.2', '10.214.0.2')}"
    route = ("ip route add 10.214.0.0/24 dev eth0", "ip route delete 10.214.0.0/24")
    with lab.changed(
        *((host, *route) for host in ("s1", "s3")),
        ("s2", to, back),
        *(names(host, RIGHT["s1"], elsewhere, RIGHT["s3"]) for host in RIGHT),
    ):
        failures = lab.failures()
    assert failures.keys() == {("interface", "s2")}, failures
    assert (
        "no interface in s1's network 10.213.0.0/24; it has eth0 10.214.0.2"
        in failures["interface", "s2"]
    )


@pytest.mark.nightly
def test_closed_ports(lab):
    with lab.net("s2", "block", "1024-65534", back="unblock"):
        failures = lab.failures()
    assert failures.keys() == {("ports", "s2")}, failures
    ways = "s1 to s2, s2 to s1, s2 to s3, s3 to s2"
    assert f"no connection from {ways}" in failures["ports", "s2"]


CLOCK = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <time.h>
int clock_gettime(clockid_t clock, struct timespec *now) {
  int code = ((int (*)(clockid_t, struct timespec *))dlsym(RTLD_NEXT, "clock_gettime"))(clock, now);
  if (clock == CLOCK_REALTIME) now->tv_sec += 7;
  return code;
}
"""


@pytest.mark.nightly
def test_little_memory_few_files_a_wrong_clock(lab, tmp_path):
    (tmp_path / "clock.c").write_text(CLOCK)
    library = tmp_path / "clock.so"
    subprocess.run(
        ["cc", "-shared", "-fPIC", "-o", library, tmp_path / "clock.c", "-ldl"], check=True
    )
    limit = "prlimit --nofile={}:20000 --pid $(cat /run/sshd.pid)"
    with lab.changed(
        login("s2", f"export LD_PRELOAD={library}"),
        ("s2", "mount -o remount,size=16m /dev/shm", "mount -o remount,size=1g /dev/shm"),
        ("s3", limit.format(512), limit.format(20000)),
    ):
        failures = lab.failures()
    assert failures.keys() == {("clock", "s2"), ("shared memory", "s2"), ("open files", "s3")}, (
        failures
    )
    # A busy machine answers late, which the error of the measurement covers.
    assert re.fullmatch(r"its clock is [67]\.\d s ahead of that of s1", failures["clock", "s2"])
    assert (
        failures["shared memory", "s2"]
        == "/dev/shm has 16 MiB free of 16 MiB; the host's slots need 128 MiB"
    )
    assert failures["open files", "s3"] == (
        "a process may open 512 files, but needs 1024 with 6 ranks"
    )


@pytest.mark.nightly
def test_gpus(lab, tmp_path):
    def driver(name, script):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "nvidia-smi").write_text(f"#!/bin/sh\n{script}\n")
        (folder / "nvidia-smi").chmod(0o755)
        return folder

    two = driver("two", "echo 'NVIDIA H200, 550.54.15'; echo 'NVIDIA H200, 550.54.15'")
    single = driver("single", "echo 'NVIDIA H200, 550.54.15'")
    other = driver("other", "echo 'NVIDIA H200, 535.1'; echo 'NVIDIA H200, 535.1'")
    broken = driver(
        "broken", "echo 'Failed to initialize NVML: Driver/library version mismatch'; exit 18"
    )
    with lab.changed(login("s2", f"PATH={single}:$PATH"), login("s3", f"PATH={other}:$PATH")):
        failures = lab.failures(path=two)
    # This environment's Horovod knows no NCCL.
    assert {(check, host) for check, host in failures if check != "horovod"} == {
        ("gpus", "s2"),
        ("gpus", "s3"),
    }
    assert failures["gpus", "s2"] == "1 GPU for 2 slots"
    assert failures["gpus", "s3"] == "driver 535.1, s1 550.54.15"
    if ("horovod", "s1") in failures:
        assert failures["horovod", "s1"] == (
            "has GPUs, but its Horovod has no NCCL (built with MPI, Gloo)"
        )
    with lab.changed(login("s2", f"PATH={broken}:$PATH")):
        failures = lab.failures(path=two)
    assert (
        failures["gpus", "s2"]
        == "nvidia-smi fails: Failed to initialize NVML: Driver/library version mismatch"
    )
    assert failures["gpus", "s3"] == "0 GPUs for 2 slots"


@pytest.mark.nightly
def test_other_versions_of_cuda_and_nccl(lab, tmp_path):
    """As the wheels say them; s2 sees other text in the place of one."""
    for name, version in (("nvidia_nccl_cu12", "2.27.3"), ("nvidia_cuda_runtime_cu12", "12.9.79")):
        metadata = tmp_path / "packages" / f"{name}-{version}.dist-info" / "METADATA"
        metadata.parent.mkdir(parents=True)
        metadata.write_text(
            f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: {version}\n"
        )
    nccl = tmp_path / "packages" / "nvidia_nccl_cu12-2.27.3.dist-info" / "METADATA"
    (tmp_path / "older").write_text(nccl.read_text().replace("2.27.3", "2.18.1"))
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "nvidia-smi").write_text(
        "#!/bin/sh\nfor gpu in 1 2; do echo 'NVIDIA H200, 550.54.15'; done\n"
    )
    (tmp_path / "bin" / "nvidia-smi").chmod(0o755)
    drivers = [login(host, f"PATH={tmp_path}/bin:$PATH") for host in ("s2", "s3")]
    with lab.changed(*drivers, over("s2", tmp_path / "older", nccl)):
        failures = lab.failures(path=tmp_path / "bin", packages=tmp_path / "packages")
    assert not any(check == "gpus" for check, _ in failures)
    assert failures["packages", "s2"] == "nvidia-nccl-cu12 2.18.1, s1 2.27.3"


def test_wrong_usage_is_one_line(lab):
    for arguments, message in (
        (["-H", "s1:x"], "is not a host and a number of ranks; write -H s1:4,s2:4"),
        (["--no-link"], "unknown option --no-link; see python -m hvtrain doctor --help"),
        (["nodel=cnn"], "unknown setting 'nodel'; did you mean 'model'?"),
    ):
        done = lab.attempt(*arguments)
        assert done.returncode == 2
        assert message in done.stderr and done.stderr.count("\n") == 1 and not done.stdout


@pytest.mark.nightly
def test_a_healthy_cluster_and_its_links(lab, data):
    report = lab.report(*HOSTS, *overrides_of(data))
    assert [row["check"] for row in report["rows"]] == HEALTHY, report["rows"]
    assert {row["status"] for row in report["rows"]} == {"PASS"}, report["rows"]
    assert report["facts"]["hosts"].keys() == {"s1", "s2", "s3"}
    assert len(report["facts"]["links"]["pairs"]) == 3


@pytest.mark.release
def test_the_slow_link_is_named(lab):
    with lab.net("s3", "rate", "50mbit", back="clear"):
        done = lab.attempt(*HOSTS)
    assert done.returncode == 1, done.stdout + done.stderr
    failed = [line for line in done.stdout.splitlines() if line.startswith("FAIL")]
    assert len(failed) == 1, done.stdout
    assert re.match(r"FAIL  links +s3: 0\.0\d Gbit/s at best, to any host", failed[0])
    assert re.search(
        r"PASS  allreduce +64 MiB over 3 hosts in \d+\.\d+ s: 0\.0\d Gbit/s", done.stdout
    )
    assert "1 of 16 checks failed in " in done.stdout.splitlines()[-1]


@pytest.mark.nightly
def test_ranks_that_do_not_start(lab):
    """s2 has too little memory for TensorFlow, and enough for everything else."""
    with lab.changed(login("s2", "ulimit -v 600000")):
        report = lab.report(*HOSTS)
    failed = [row for row in report["rows"] if row["status"] == "FAIL"]
    assert [row["check"] for row in failed] == ["allreduce"], failed
    assert failed[0]["finding"].startswith("the measurement failed; FIRST FAILURE rank 1 ")
    assert "hvtrain.checks.measure_links" in failed[0]["fix"]
