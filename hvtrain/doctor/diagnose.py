"""A diagnosis: asks all hosts, judges, tries their ports, measures their links; prints a table or JSON."""

import json
import os
import secrets
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hvtrain.doctor.ask_hosts import Answer, ask
from hvtrain.doctor.judge_links import judge_links
from hvtrain.doctor.judge_machine import clock_differences, judge_clocks, judge_machines
from hvtrain.doctor.judge_network import Way, judge_interfaces, judge_names, judge_ports
from hvtrain.doctor.judge_software import judge_software
from hvtrain.doctor.measure_links import measure
from hvtrain.doctor.rows import Row, fail, skip
from hvtrain.launch.job import Host
from hvtrain.launch.ssh import Ssh

FACTS_SECONDS = 30.0
PORTS_SECONDS = 10.0
# If one of these fails, ranks would not start, or would wait for each other.
_BEFORE_LINKS = ("ssh", "folder", "python", "packages", "code", "horovod", "names", "interface", "ports")


@dataclass(frozen=True)
class Checkup:
    """The scope of a diagnosis.

    Args:
        hosts: those of -H.
        ssh: how they are reached.
        interfaces: names that the user chose.
        run_dir: the run folder, relative to the working folder or not.
        dataset: the data set's folder or file, likewise; None if the run has none.
        links: measure how fast the hosts reduce together.
    """

    hosts: tuple[Host, ...]
    ssh: Ssh
    interfaces: str | None = None
    run_dir: str = "runs"
    dataset: str | None = None
    links: bool = True

    @property
    def names(self) -> list[str]:
        return [host.name for host in self.hosts]

    @property
    def slots(self) -> dict[str, int]:
        return {host.name: host.slots for host in self.hosts}


class Table:
    """Prints rows as they come, or keeps them for one JSON object."""

    def __init__(self, as_json: bool) -> None:
        self._began = time.monotonic()
        self._as_json = as_json
        self.rows: list[Row] = []

    @property
    def passed(self) -> bool:
        return not self.failed()

    def failed(self) -> list[str]:
        """The failed checks, each once."""
        return list(dict.fromkeys(row.check for row in self.rows if row.status == "FAIL"))

    def add(self, rows: Iterable[Row]) -> None:
        for row in rows:
            self.rows.append(row)
            if not self._as_json:
                print(row.text(), flush=True)

    def end(self, facts: Mapping[str, Any]) -> None:
        """Prints the last line, or all of the JSON."""
        if self._as_json:
            rows = [row.as_dict() for row in self.rows]
            print(json.dumps({"passed": self.passed, "rows": rows, "facts": facts}))
            return
        checks = {row.check for row in self.rows if row.status != "SKIP"}
        seconds = time.monotonic() - self._began
        outcome = f"{len(self.failed())} of {len(checks)} checks failed" if self.failed() else "all checks passed"
        print(f"{outcome} in {seconds:.0f} s", flush=True)


def diagnose(checkup: Checkup, as_json: bool = False) -> bool:
    """True if no check failed."""
    table = Table(as_json)
    answers = ask(dict.fromkeys(checkup.names, _request(checkup)), checkup.ssh, FACTS_SECONDS)
    cluster = {host: answer.facts for host, answer in answers.items() if answer.facts}
    facts: dict[str, Any] = {"hosts": cluster, "clocks": {}, "ports": {}, "links": None}
    table.add(_reached(answers))
    if cluster:
        table.add(judge_software(cluster))
        table.add(judge_machines(cluster, checkup.slots))
        table.add(judge_names(cluster, checkup.names))
        rows, ways = judge_interfaces(cluster, checkup.names, checkup.interfaces)
        table.add(rows)
        facts["ports"] = _try_ports(checkup, ways, {host: found["port"] for host, found in cluster.items()}, table)
        facts["clocks"] = clock_differences({host: answers[host].clock for host in cluster}, facts["ports"])
        table.add(judge_clocks(facts["clocks"]))
        facts["links"] = _measure_links(checkup, table)
    table.end(facts)
    return table.passed


def _request(checkup: Checkup) -> dict[str, Any]:
    return {
        "work": "facts",
        "folder": str(Path.cwd()),
        # Ranks get it from the launcher, whatever a login on the host sets.
        "python_path": [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path],
        "python": sys.executable,
        "names": checkup.names,
        "run_dir": checkup.run_dir,
        "dataset": checkup.dataset,
    }


def _reached(answers: Mapping[str, Answer]) -> list[Row]:
    rows = []
    for host, answer in answers.items():
        if answer.facts is None:
            found, _, fix = answer.trouble.partition("; ")
            found = found.removeprefix(f"host {host} ")
            rows += [fail("ssh", host, found, fix), skip("all other", "nothing more is known of this host", host)]
    return rows or [Row("ssh", "PASS", f"reached: {', '.join(answers)}")]


def _try_ports(checkup: Checkup, ways: Mapping[str, Way], ports: Mapping[str, int], table: Table) -> dict[str, Any]:
    """Has all hosts listen and connect at once. Returns what each one reached."""
    if len(ways) < 2:
        table.add([skip("ports", "one host" if len(checkup.hosts) < 2 else "no two hosts answer in a common network")])
        return {}
    token = secrets.token_hex(8)
    requests = {
        host: {
            "work": "ports",
            "me": host,
            "port": ports[host],
            "token": token,
            "others": {other: [way.address, ports[other]] for other, way in ways.items() if other != host},
            "seconds": PORTS_SECONDS,
        }
        for host in ways
    }
    answers = {host: answer.facts for host, answer in ask(requests, checkup.ssh, PORTS_SECONDS + 10).items()}
    table.add(judge_ports(answers, ways, ports))
    return dict(answers)


def _measure_links(checkup: Checkup, table: Table) -> dict[str, Any] | None:
    failed = [check for check in table.failed() if check in _BEFORE_LINKS]
    if len(checkup.hosts) < 2:
        reason = "one host"
    elif not checkup.links:
        reason = "--no-links"
    elif failed:
        reason = f"fix this first: {', '.join(failed)}"
    else:
        result = measure(checkup.names, checkup.ssh, checkup.interfaces)
        if result.measured:
            table.add(judge_links(result.measured, checkup.names))
        else:
            found = f"the ranks did not reduce; {result.said}"
            table.add([fail("allreduce", None, found, f"look at all that they say: {result.line}")])
        return result.measured
    table.add([skip("allreduce", reason), skip("links", reason)])
    return None
