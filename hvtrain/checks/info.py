"""`python -m hvtrain info`: versions, build, devices and hosts, as text to paste into an issue."""

import os
import re
from collections.abc import Mapping
from typing import Any

from hvtrain.checks.ask_hosts import Facts, ask, facts_request
from hvtrain.launch.environment import is_sendable
from hvtrain.launch.job import parse_hosts
from hvtrain.launch.remote_hosts import Ssh
from hvtrain.system.command import Parser
from hvtrain.system.text import aligned, human_bytes

# Time limit for the answers of all hosts, which are asked at the same time.
SECONDS = 30.0
# Environment variables that change how ranks connect, reduce and compute. Others may be private.
_SHOWN = re.compile(
    r"(HOROVOD|HVTRAIN|NCCL|TF|XLA|OMPI_MCA|GLOO|UCX|OMP)_\w+|CUDA_VISIBLE_DEVICES|LD_LIBRARY_PATH"
)


def main() -> int:
    """Prints the facts of this host, or of the hosts of -H. Raises ConfigError for invalid options."""
    parser = Parser(
        "python -m hvtrain info",
        usage="%(prog)s [-H s1,s2]",
        description="""\
Prints versions, Horovod's build, devices and networks of this host or of all hosts of -H, and the environment variables
of this host that matter, except those that look like secrets. python -m hvtrain doctor looks for problems.""",
    )
    parser.add_ssh()
    options = parser.parse_args()
    # Without -H, only this host.
    names = [host.name for host in parse_hosts(options.hosts)]
    ssh = Ssh(options.port, options.identity_file)
    answers, failures = ask("facts", dict.fromkeys(names, facts_request(names)), ssh, SECONDS)

    # A host that does not answer takes one line; the others are still shown.
    lines: dict[str, str] = {}
    for host in names:
        described = _describe(answers[host]) if host in answers else {"ssh": failures[host]}
        prefix = f"{host}: " if len(names) > 1 else ""
        lines |= {f"{prefix}{name}": text for name, text in described.items()}

    # is_sendable() is the launcher's test for variables that may be sent to other hosts, and refuses
    # secrets. It refuses CUDA_VISIBLE_DEVICES only because other hosts have other GPUs.
    lines |= {
        name: os.environ[name]
        for name in sorted(os.environ)
        if _SHOWN.fullmatch(name)
        and (name == "CUDA_VISIBLE_DEVICES" or is_sendable(name, os.environ))
    }
    print("```text", *aligned(list(lines.items()), "<<"), "```", sep="\n")
    return 0


def _describe(facts: Facts) -> dict[str, str]:
    """Returns a host's facts as texts by name."""
    machine = facts["machine"]
    packages = {name: version for name, version in facts["packages"].items() if version}
    own_version = packages.pop("hvtrain", "without metadata")
    built_with = ", ".join(facts["horovod"]["built_with"])

    return {
        "hvtrain": f"{own_version}{facts['code']['commit']}",
        "python": facts["python"]["version"],
        "packages": ", ".join(f"{name} {version}" for name, version in packages.items()) or "none",
        "horovod built with": built_with or "nothing: its library is missing",
        "system": machine["system"],
        "machine": f"{machine['cores']} cores, {human_bytes(machine['memory'])} of memory",
        "gpus": _gpus(facts["gpus"]),
        "interfaces": ", ".join(
            f"{item['name']} {item['network']}" for item in facts["interfaces"]
        ),
    }


def _gpus(gpus: Mapping[str, Any]) -> str:
    if gpus["error"]:
        return gpus["error"]
    if not gpus["names"]:
        return "none"
    return f"{', '.join(gpus['names'])}; driver {gpus['driver']}"
