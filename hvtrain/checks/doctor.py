"""`python -m hvtrain doctor`: finds what is wrong with these hosts before a run does.

Collects facts from all hosts, checks them, tries ports and measures links; prints a table or JSON.
"""

import argparse
import json
import os
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hvtrain.checks.ask_hosts import Facts, ask, facts_request
from hvtrain.checks.judge_hosts import judge_clocks, judge_machines, judge_software
from hvtrain.checks.judge_network import Endpoint, judge_interfaces, judge_names, judge_ports
from hvtrain.checks.measure_links import measure
from hvtrain.checks.table import CheckTable, Row, fail, passed, skip
from hvtrain.config.compose import composed
from hvtrain.launch.job import parse_hosts
from hvtrain.launch.remote_hosts import Ssh
from hvtrain.system.command import RUN_SETTINGS, Parser
from hvtrain.system.files import is_remote

FACTS_SECONDS = 30.0
PORTS_SECONDS = 10.0
# If one of these fails, ranks would not start, or would hang.
_BEFORE_LINKS = (
    "ssh",
    "folder",
    "python",
    "packages",
    "code",
    "horovod",
    "names",
    "interface",
    "ports",
)

EPILOG = f"""\
{RUN_SETTINGS}

examples:
  python -m hvtrain doctor                                 this host
  python -m hvtrain doctor -H s1:4,s2:4,s3:4               a cluster, in about half a minute
  python -m hvtrain doctor -H s1:4,s2:4 dataset=image_folder dataset.dir=/data run.dir=/runs/a
                                                           the same, with a run's data set and run folder

checks:
  ssh, folder, python, packages, code, horovod, data set   the same on all hosts
  clock, shared memory, open files, run folder, gpus       clocks agree; memory, file limits, disk and GPUs suffice
  names, interface, ports                                  hosts find and reach each other
  allreduce    64 MiB over all hosts: bytes / seconds, and that times 2 (n - 1) / n, comparable to a link's speed
  links        8 MiB between every two hosts (with more than 16 hosts, only between neighbours); a link is slow below a
               third of the usual speed
"""


def main() -> int:
    """Examines the hosts of -H; returns 0 if no check failed, else 1. Raises ConfigError for invalid settings."""
    options = _parser().parse_with_overrides()
    slots = {host.name: host.slots for host in parse_hosts(options.hosts)}
    run_dir = None
    dataset = None
    if options.overrides:
        config = composed(options.overrides)
        run_dir = config.run.dir
        dataset = _local_data(config.dataset)
    if run_dir is None or is_remote(run_dir):
        run_dir = "runs"

    table = CheckTable(width=13, is_quiet=options.json)
    facts = examine(slots, facts_request([*slots], run_dir, dataset), options, table)
    failed = table.failed_checks
    if options.json:
        rows = [asdict(row) for row in table.rows]
        print(json.dumps({"passed": not failed, "rows": rows, "facts": facts}))
    else:
        checks = {row.check for row in table.rows if row.status != "SKIP"}
        outcome = f"{len(failed)} of {len(checks)} checks failed" if failed else "all checks passed"
        table.end(outcome)

    return 1 if failed else 0


def examine(
    slots: Mapping[str, int],
    request: Facts,
    options: argparse.Namespace,
    table: CheckTable,
) -> Facts:
    """Adds the rows of all checks to the table, the slow ones last. Returns the facts behind them.

    Args:
        slots: The number of ranks of each host of -H.
        request: The request for facts that is sent to each host.
        options: The parsed command line.
        table: The table to which rows are added.
    """
    names = list(slots)
    ssh = Ssh(options.port, options.identity_file)

    cluster, failures = ask("facts", dict.fromkeys(names, request), ssh, FACTS_SECONDS)
    facts: Facts = {"hosts": cluster, "ports": {}, "links": None}
    table.add(_judge_ssh(names, failures))
    if not cluster:
        return facts

    # From the cheapest check to the slowest, since rows are printed as they are added.
    table.add(judge_software(cluster))
    table.add(judge_machines(cluster, slots))
    table.add(judge_names(cluster, names))
    rows, endpoints = judge_interfaces(cluster, names, options.network_interfaces)
    table.add(rows)
    # A host that failed has no endpoint, so its ports are not tried.
    if len(endpoints) > 1:
        facts["ports"], silent = _try_ports(endpoints, ssh)
        table.add(judge_ports(facts["ports"], silent, endpoints))
        # Clocks are compared with the first host's.
        first = next(iter(cluster))
        table.add(judge_clocks(facts["ports"].get(first, {}).get("clocks", {}), first))
    else:
        reason = "one host" if len(names) < 2 else "no two hosts answer on a common network"
        table.add([skip("ports", reason), skip("clock", reason)])

    reason = _reason_to_skip_links(options, names, table)
    if reason:
        table.add([skip("allreduce", reason), skip("links", reason)])
    else:
        # This takes half a minute, so it comes last, and only if ranks would start.
        facts["links"], rows = measure(names, ssh, options.network_interfaces)
        table.add(rows)

    return facts


def _reason_to_skip_links(
    options: argparse.Namespace, names: Sequence[str], table: CheckTable
) -> str:
    """Returns why the links cannot be measured; empty if they can be."""
    if len(names) < 2:
        return "one host"
    if not options.links:
        return "--no-links"
    broken = [check for check in table.failed_checks if check in _BEFORE_LINKS]
    return f"fix this first: {', '.join(broken)}" if broken else ""


def _judge_ssh(names: Sequence[str], failures: Mapping[str, str]) -> list[Row]:
    rows = []
    for host, failure in failures.items():
        finding, _, fix = failure.removeprefix(f"host {host} ").partition("; ")
        rows += [
            fail("ssh", host, finding, fix),
            skip("all other", "no answer from this host", host),
        ]
    return rows or [passed("ssh", f"reached: {', '.join(names)}")]


def _try_ports(
    endpoints: Mapping[str, Endpoint], ssh: Ssh
) -> tuple[dict[str, Facts], dict[str, str]]:
    """Makes all hosts listen and connect in parallel; returns their results, and the reason for each missing one."""
    # Another program may listen on a port or connect to it; only these hosts know the token.
    token = secrets.token_hex(8)
    requests = {
        host: {
            "me": host,
            "port": endpoint.port,
            "token": token,
            "others": {
                other: [peer.address, peer.port]
                for other, peer in endpoints.items()
                if other != host
            },
            "seconds": PORTS_SECONDS,
        }
        for host, endpoint in endpoints.items()
    }
    # The extra seconds are for ssh and for starting Python.
    return ask("exchange", requests, ssh, PORTS_SECONDS + 10)


def _local_data(dataset: Mapping[str, Any]) -> str | None:
    """Returns the local file or folder of a data set; None if it has none, or is in object storage."""
    for name in ("dir", "path", "file"):
        value = dataset.get(name)
        # In a user's own data set, `path` may not be a string, and `file`
        # may name a table in a library.
        if isinstance(value, str) and not is_remote(value):
            # Path.expanduser would raise for a user without a home, as in a container; this keeps ~.
            path = Path(os.path.expanduser(value))  # noqa: PTH111
            is_pattern = any(sign in value for sign in "*?[")
            if name != "file" or path.exists() or (path.suffix and not is_pattern):
                return str(path)
    return None


def _parser() -> Parser:
    parser = Parser(
        "python -m hvtrain doctor",
        usage="%(prog)s [OPTION ...] [GROUP=CHOICE ...] [SETTING=VALUE ...]",
        description="""\
Looks at every host over ssh and prints one line for each check: PASS, FAIL with what to do, or SKIP with the reason.
Exits with 1 when a check fails.""",
        epilog=EPILOG,
    )
    parser.add_ssh()
    option = parser.add_argument
    option("--network-interfaces", metavar="NAMES", help="use these instead of the ones found")

    option(
        "--no-links",
        dest="links",
        action="store_false",
        help="do not measure allreduce and links, which takes about half a minute",
    )
    option("--json", action="store_true", help="print one JSON object: passed, rows, facts")
    return parser
