"""`python -m hvtrain info`: versions, build, devices and hosts as a block of text to paste into an issue."""

import os
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hvtrain.checks.ask_hosts import Answer, ask, facts_request
from hvtrain.launch.environment import travels
from hvtrain.launch.job import parse_hosts
from hvtrain.launch.ssh import Ssh
from hvtrain.system.checkout import checkout
from hvtrain.system.command import Parser
from hvtrain.system.text import human_bytes

SECONDS = 30.0
# Variables that change how ranks meet, reduce and compute; the rest of an environment is private.
_TELLING = re.compile(r"(HOROVOD|HVTRAIN|NCCL|TF|XLA|OMPI_MCA|GLOO|UCX|OMP)_\w+|CUDA_VISIBLE_DEVICES|LD_LIBRARY_PATH")


def main() -> int:
    """Prints the block. Raises ConfigError for unknown options."""
    options = _parser().parse_args(sys.argv[1:])
    names = [host.name for host in parse_hosts(options.hosts or "localhost")]
    answers = ask(dict.fromkeys(names, facts_request(names)), Ssh(options.port, options.identity_file), SECONDS)
    lines = dict(pair for host, answer in answers.items() for pair in _host(host, answer, len(names) > 1))
    lines |= {name: os.environ[name] for name in sorted(os.environ) if _TELLING.fullmatch(name) and _is_open(name)}
    width = max(map(len, lines))
    print("```text", *(f"{name:<{width}}  {text}" for name, text in lines.items()), "```", sep="\n")
    return 0


def _host(host: str, answer: Answer, is_named: bool) -> Iterator[tuple[str, str]]:
    before = f"{host}: " if is_named else ""
    if answer.facts is None:
        yield f"{before}ssh", answer.trouble
        return
    facts = answer.facts
    packages = {name: version for name, version in facts["packages"].items() if version}
    machine, gpus, horovod = facts["machine"], facts["gpus"], facts["horovod"]
    shown = {
        "hvtrain": f"{packages.pop('hvtrain', 'without metadata')}{commit_of(facts['code']['folder'])}",
        "python": facts["python"]["version"],
        "packages": ", ".join(f"{name} {version}" for name, version in packages.items()),
        "horovod built with": ", ".join(horovod["built_with"]) or "nothing: its library is missing",
        "cuda": ", ".join(f"{name} {version}" for name, version in facts["cuda"].items()),
        "system": machine["system"],
        "machine": f"{machine['cores']} cores, {human_bytes(machine['memory'])} of memory",
        "gpus": gpus["error"] or (f"{', '.join(gpus['names'])}; driver {gpus['driver']}" if gpus["names"] else "none"),
        "interfaces": ", ".join(f"{one['name']} {one['network']}" for one in facts["interfaces"]),
    }
    yield from ((before + name, text) for name, text in shown.items() if text)


def commit_of(folder: str | None) -> str:
    """The commit of the folder's checkout, and how many files differ from it; empty for an installed package."""
    if folder is None or not (Path(folder).parent / ".git").exists():
        return ""
    found = checkout(Path(folder))
    if found is None:
        return ""
    number = len(found["changed"])
    return f" ({found['commit'][:7]}{f', {number} changed' if number else ''})"


def _is_open(name: str, environ: Mapping[str, str] = os.environ) -> bool:
    return name == "CUDA_VISIBLE_DEVICES" or travels(name, environ)


def _parser() -> Any:
    parser = Parser(
        "python -m hvtrain info",
        usage="%(prog)s [-H s1,s2]",
        description="""\
Prints versions, Horovod's build, devices, networks and the variables that matter, of this host or of all hosts of -H.
Variables whose name or value looks like a secret are left out. python -m hvtrain doctor looks for problems.""",
    )
    parser.add_argument("-H", dest="hosts", metavar="s1,s2", help="hosts to ask over ssh; default: this host")
    parser.add_argument("-p", dest="port", type=int, metavar="PORT", help="ssh port; other options go in ~/.ssh/config")
    parser.add_argument("-i", dest="identity_file", metavar="KEY", help="ssh key")
    return parser
