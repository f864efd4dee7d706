"""`python -m hvtrain doctor`: finds what is wrong with these hosts before a run does.

Asks all hosts, judges, tries their ports and measures their links; prints a table or JSON.
"""

import json
import secrets
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from hvtrain.checks.ask_hosts import Answer, ask, facts_request
from hvtrain.checks.judge_machine import clock_differences, judge_clocks, judge_machines
from hvtrain.checks.judge_network import Endpoint, judge_interfaces, judge_names, judge_ports
from hvtrain.checks.judge_software import judge_software
from hvtrain.checks.measure_links import measure
from hvtrain.checks.rows import Row, fail, skip
from hvtrain.config.compose import compose
from hvtrain.config.schema import from_dict
from hvtrain.launch.job import parse_hosts
from hvtrain.launch.ssh import Ssh
from hvtrain.system.command import RUN_SETTINGS, Parser

FACTS_SECONDS = 30.0
PORTS_SECONDS = 10.0
# If one of these fails, ranks would not start, or would wait for each other.
_BEFORE_LINKS = ("ssh", "folder", "python", "packages", "code", "horovod", "names", "interface", "ports")

EPILOG = f"""\
{RUN_SETTINGS}

examples:
  python -m hvtrain doctor                                 this host
  python -m hvtrain doctor -H s1:4,s2:4,s3:4               a cluster, in about half a minute
  python -m hvtrain doctor -H s1:4,s2:4 dataset=image_folder dataset.dir=/data run.dir=/runs/a
                                                           and that run's data set and run folder

checks:
  ssh, folder, python, packages, code, horovod, data set   the same on all hosts
  clock, shared memory, open files, run folder, gpus       enough of each
  names, interface, ports                                  hosts find and reach each other
  allreduce    64 MiB over all hosts: bytes / seconds, and that times 2 (n - 1) / n, which compares with a link's speed
  links        8 MiB between each two hosts (with more than 16 hosts between neighbours); slow is under a third of the
               usual
"""


def main() -> int:
    """0 when no check failed, 1 otherwise. Raises ConfigError."""
    options = _parser().parse_with_words(sys.argv[1:])
    slots = {host.name: host.slots for host in parse_hosts(options.hosts or "localhost")}
    names, chosen, ssh = list(slots), options.network_interfaces, Ssh(options.port, options.identity_file)
    run_dir, dataset = "runs", None
    if options.words:
        if not (trees := compose(options.words)):
            return 0
        config = from_dict(trees[0])
        places = (config.dataset.get(name) for name in ("dir", "path"))  # A user's own data set may have a `path`.
        dataset = next((place for place in places if isinstance(place, str)), None)
        run_dir = config.run.dir or "runs"
    table = Table(options.json)
    answers = ask(dict.fromkeys(names, facts_request(names, run_dir, dataset)), ssh, FACTS_SECONDS)
    cluster = {host: answer.facts for host, answer in answers.items() if answer.facts}
    facts: dict[str, Any] = {"hosts": cluster, "clocks": {}, "ports": {}, "links": None}
    table.add(_reached(answers))
    if cluster:
        table.add([*judge_software(cluster), *judge_machines(cluster, slots), *judge_names(cluster, names)])
        rows, endpoints = judge_interfaces(cluster, names, chosen)
        table.add(rows)
        if len(endpoints) < 2:
            table.add([skip("ports", "one host" if len(names) < 2 else "no two hosts answer in a common network")])
        else:
            ports = {host: found["port"] for host, found in cluster.items()}
            facts["ports"] = _try_ports(endpoints, ports, ssh)
            table.add(judge_ports(facts["ports"], endpoints, ports))
        facts["clocks"] = clock_differences({host: answers[host].clock for host in cluster}, facts["ports"])
        table.add(judge_clocks(facts["clocks"]))
        wrong = [check for check in table.failed() if check in _BEFORE_LINKS]
        obstacles = {"one host": len(names) < 2, "--no-links": not options.links}
        obstacles[f"fix this first: {', '.join(wrong)}"] = bool(wrong)
        if why_not := next((why for why, holds in obstacles.items() if holds), None):
            table.add([skip("allreduce", why_not), skip("links", why_not)])
        else:
            facts["links"], rows = measure(names, ssh, chosen)
            table.add(rows)
    table.end(facts)
    return 1 if table.failed() else 0


@dataclass
class Table:
    """Prints rows as they come, or keeps them for one JSON object."""

    as_json: bool
    rows: list[Row] = field(default_factory=list)
    began: float = field(default_factory=time.monotonic)

    def failed(self) -> list[str]:
        """The failed checks, each once."""
        return list(dict.fromkeys(row.check for row in self.rows if row.status == "FAIL"))

    def add(self, rows: Iterable[Row]) -> None:
        for row in rows:
            self.rows.append(row)
            if not self.as_json:
                print(row.text(), flush=True)

    def end(self, facts: Mapping[str, Any]) -> None:
        """Prints the last line, or all of the JSON."""
        failed = self.failed()
        if self.as_json:
            print(json.dumps({"passed": not failed, "rows": [asdict(row) for row in self.rows], "facts": facts}))
            return
        checks = {row.check for row in self.rows if row.status != "SKIP"}
        outcome = f"{len(failed)} of {len(checks)} checks failed" if failed else "all checks passed"
        print(f"{outcome} in {time.monotonic() - self.began:.0f} s", flush=True)


def _parser() -> Parser:
    parser = Parser(
        "python -m hvtrain doctor",
        usage="%(prog)s [OPTION ...] [GROUP=CHOICE ...] [SETTING=VALUE ...]",
        description="""\
Looks at every host over ssh and prints one line for each check: PASS, FAIL with what to do, or SKIP with the reason.
Exits with 1 when a check fails.""",
        epilog=EPILOG,
    )
    add = parser.add_argument
    add("-H", dest="hosts", metavar="s1:4,s2:4", help="hosts and their slots; default: this host")
    add("-p", dest="port", type=int, metavar="PORT", help="ssh's; users and the rest go in ~/.ssh/config")
    add("-i", dest="identity_file", metavar="KEY", help="ssh's key")
    add("--network-interfaces", metavar="NAMES", help="use these instead of the ones found")
    slow = "do not measure how fast the hosts reduce together: seconds instead of half a minute"
    add("--no-links", dest="links", action="store_false", help=slow)
    add("--json", action="store_true", help="print one JSON object: passed, rows, facts")
    return parser


def _reached(answers: Mapping[str, Answer]) -> list[Row]:
    rows = []
    for host, answer in answers.items():
        if answer.facts is None:
            found, _, fix = answer.trouble.removeprefix(f"host {host} ").partition("; ")
            rows += [fail("ssh", host, found, fix), skip("all other", "nothing more is known of this host", host)]
    return rows or [Row("ssh", "PASS", f"reached: {', '.join(answers)}")]


def _try_ports(
    endpoints: Mapping[str, Endpoint], ports: Mapping[str, int], ssh: Ssh
) -> dict[str, dict[str, Any] | None]:
    """Has all hosts listen and connect at once. Returns each one's result; None if it did not answer."""
    token = secrets.token_hex(8)
    requests = {
        host: {
            "work": "ports",
            "me": host,
            "port": ports[host],
            "token": token,
            "others": {other: [found.address, ports[other]] for other, found in endpoints.items() if other != host},
            "seconds": PORTS_SECONDS,
        }
        for host in endpoints
    }
    return {host: answer.facts for host, answer in ask(requests, ssh, PORTS_SECONDS + 10).items()}
