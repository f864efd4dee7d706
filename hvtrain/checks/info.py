"""`python -m hvtrain info`: versions, build, devices and hosts as a block of text to paste into an issue."""

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hvtrain.checks.ask_hosts import Facts, ask, facts_request
from hvtrain.launch.environment import travels
from hvtrain.launch.job import parse_hosts
from hvtrain.launch.remote_hosts import Ssh
from hvtrain.system.command import Parser
from hvtrain.system.host_facts import checkout
from hvtrain.system.text import human_bytes

SECONDS = 30.0
# Environment variables that change how ranks connect, reduce and compute; the others are private.
_TELLING = re.compile(
    r"(HOROVOD|HVTRAIN|NCCL|TF|XLA|OMPI_MCA|GLOO|UCX|OMP)_\w+|CUDA_VISIBLE_DEVICES|LD_LIBRARY_PATH"
)


def main() -> int:
    """Prints the block. Raises ConfigError for unknown options."""
    parser = Parser(
        "python -m hvtrain info",
        usage="%(prog)s [-H s1,s2]",
        description="""\
Prints versions, Horovod's build, devices, networks and the variables that matter, of this host or of all hosts of -H.
Variables whose name or value looks like a secret are left out. python -m hvtrain doctor looks for problems.""",
    )
    parser.add_ssh()
    options = parser.parse_args()
    # Without -H, only this host.
    names = [host.name for host in parse_hosts(options.hosts)]
    ssh = Ssh(options.port, options.identity_file)
    answers, troubles = ask(dict.fromkeys(names, facts_request(names)), ssh, SECONDS)

    # A host that does not answer takes one line; the others are still shown.
    lines: dict[str, str] = {}
    for host in names:
        described = {"ssh": troubles.get(host, "")}
        if host in answers:
            described = _describe(answers[host])
        prefix = f"{host}: " if len(names) > 1 else ""
        lines |= {f"{prefix}{name}": text for name, text in described.items()}

    # travels() keeps secrets out: it is the launcher's test for what may be sent to other hosts. It
    # refuses CUDA_VISIBLE_DEVICES only because other hosts have other GPUs.
    lines |= {
        name: os.environ[name]
        for name in sorted(os.environ)
        if _TELLING.fullmatch(name)
        and (name == "CUDA_VISIBLE_DEVICES" or travels(name, os.environ))
    }
    width = max(map(len, lines))
    print("```text", *(f"{name:<{width}}  {text}" for name, text in lines.items()), "```", sep="\n")
    return 0


def _describe(facts: Facts) -> dict[str, str]:
    """Returns a host's facts as text by name, without empty ones."""
    machine = facts["machine"]
    packages = {name: version for name, version in facts["packages"].items() if version}
    version = packages.pop("hvtrain", "without metadata")

    lines = {
        "hvtrain": f"{version}{commit_of(facts['code']['folder'])}",
        "python": facts["python"]["version"],
        "packages": ", ".join(f"{name} {version}" for name, version in packages.items()),
        "horovod built with": ", ".join(facts["horovod"]["built_with"])
        or "nothing: its library is missing",
        "system": machine["system"],
        "machine": f"{machine['cores']} cores, {human_bytes(machine['memory'])} of memory",
        "gpus": _gpus(facts["gpus"]),
        "interfaces": ", ".join(
            f"{item['name']} {item['network']}" for item in facts["interfaces"]
        ),
    }
    return {name: text for name, text in lines.items() if text}


def _gpus(gpus: Mapping[str, Any]) -> str:
    if gpus["error"]:
        return gpus["error"]
    if not gpus["names"]:
        return "none"
    return f"{', '.join(gpus['names'])}; driver {gpus['driver']}"


def commit_of(folder: str | None) -> str:
    """Returns the commit of the folder's checkout and how many files differ from it, as " (1a2b3c4, 2 changed)".

    Empty for an installed package.
    """
    if folder is None or not (Path(folder).parent / ".git").exists():
        return ""

    commit = checkout(Path(folder))
    if commit is None:
        return ""

    text = commit["commit"][:7]
    # A version alone would hide changes that were never committed.
    if commit["changed"]:
        text += f", {len(commit['changed'])} changed"
    return f" ({text})"
