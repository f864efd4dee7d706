"""Judges whether the hosts can resolve and reach each other: names, interfaces, ports. Pure."""

import ipaddress
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hvtrain.checks.rows import Cluster, Row, all_or, fail, skip


@dataclass(frozen=True)
class Endpoint:
    """Where other hosts reach a host: one of its interfaces, and that interface's address."""

    interface: str
    address: str


def judge_names(cluster: Cluster, names: Sequence[str]) -> list[Row]:
    """Checks that hostnames are unique, and that all hosts that answered resolve each other's names correctly.

    names: all names in -H.
    """
    rows = []
    owners: dict[str, str] = {}
    for host, facts in cluster.items():
        if (owner := owners.setdefault(facts["hostname"], host)) != host:
            found = f"has the hostname {facts['hostname']}, as {owner} does; Horovod would treat them as one host"
            rows.append(fail("names", host, found, f"on {host}: hostnamectl set-hostname {host}"))
    known = {name: _address(cluster, name) for name in cluster}
    for host in cluster if len(names) > 1 else ():
        if problems := list(_name_problems(cluster, host, known)):
            found, fix = problems[0]
            more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
            rows.append(fail("names", host, found + more, fix))
    shown = ", ".join(f"{name} {address}" for name, address in known.items())
    return all_or(rows, "names", f"the same on every host: {shown}" if len(names) > 1 else shown)


def _address(cluster: Cluster, name: str) -> str | None:
    """The address to which most hosts resolve a name; a loopback address only if there is no other."""
    found = [address for facts in cluster.values() if (address := facts["addresses"][name])]
    counted = Counter(address for address in found if not _is_loopback(address)) or Counter(found)
    return counted.most_common(1)[0][0] if counted else None


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address).is_loopback


def _name_problems(cluster: Cluster, host: str, known: Mapping[str, str | None]) -> Iterator[tuple[str, str]]:
    """Yields the names that one host resolves wrongly, each with the fix. known: _address() of each name."""
    for name in cluster:
        address, right = cluster[host]["addresses"][name], known[name]
        if not any(item["address"] == right for item in cluster[name]["interfaces"]):
            right = None
        line = f"{right or 'ADDRESS'} {name}"
        if address is None:
            yield f"has no address for {name}", f"on {host}: echo '{line}' >> /etc/hosts, or add it to DNS"
        elif _is_loopback(address):
            found = f"resolves {name} to {address}, where no other host reaches it"
            yield found, f"on {host}: in /etc/hosts replace '{address} {name}' with '{line}'"
        elif address != known[name]:
            found = f"resolves {name} to {address}; others resolve it to {known[name]}"
            yield found, f"on {host}: in /etc/hosts or DNS give {name} one address on all hosts: '{line}'"
        elif right is None:
            found = f"resolves {name} to {address}, but no interface of {name} has that address"
            yield found, f"on {host}: in /etc/hosts or DNS give {name} an address that it has (there: ip -4 address)"


def judge_interfaces(
    cluster: Cluster, names: Sequence[str], wanted: str | None = None
) -> tuple[list[Row], dict[str, Endpoint]]:
    """Checks that each host has an interface in the first host's network. Also returns the endpoints, by host.

    wanted: the value of --network-interfaces, names separated by commas. A host that fails has no endpoint.
    """
    if len(names) < 2:
        return [Row("interface", "PASS", "one host")], {}
    first = next(iter(cluster))
    chosen = wanted.split(",") if wanted else None
    address = _address(cluster, first)
    usable = [item for item in cluster[first]["interfaces"] if not _is_loopback(item["address"])]
    fitting = (item for item in usable if (item["name"] in chosen if chosen else item["address"] == address))
    if (start := next(fitting, None)) is None:
        found = f"has no interface {wanted}" if wanted else f"no interface has its address {address}"
        return [fail("interface", first, f"{found}; it has {_listed(cluster[first])}", _INTERFACE_FIX)], {}
    network = ipaddress.ip_network(start["network"])
    rows, endpoints = [], {first: Endpoint(start["name"], start["address"])}
    for host, facts in list(cluster.items())[1:]:
        inside = [item for item in facts["interfaces"] if ipaddress.ip_address(item["address"]) in network]
        inside = [item for item in inside if not chosen or item["name"] in chosen]
        item = next((item for item in inside if item["address"] == _address(cluster, host)), (inside or [None])[0])
        twin = next((other for other, used in endpoints.items() if item and used.address == item["address"]), None)
        if item is None:
            found = f"no interface{f' {wanted}' if wanted else ''} in {first}'s network {network}"
            rows.append(fail("interface", host, f"{found}; it has {_listed(facts)}", _INTERFACE_FIX))
        elif twin:
            found = f"{item['name']} has {item['address']} here and on {twin}, so it cannot join the hosts"
            rows.append(fail("interface", host, found, _INTERFACE_FIX))
        else:
            endpoints[host] = Endpoint(item["name"], item["address"])
    shown = ", ".join(sorted({endpoint.interface for endpoint in endpoints.values()}))
    return all_or(rows, "interface", f"{shown} in {network}"), endpoints


_INTERFACE_FIX = "give hosts in -H by their addresses in one network, or choose: --network-interfaces NAME"


def _listed(facts: Mapping[str, Any]) -> str:
    return ", ".join(f"{item['name']} {item['address']}" for item in facts["interfaces"] if item["name"] != "lo")


def judge_ports(
    answers: Mapping[str, Mapping[str, Any] | None], endpoints: Mapping[str, Endpoint], ports: Mapping[str, int]
) -> list[Row]:
    """Checks that each host reaches a free port of each other host.

    answers: each host's result of probe_network.Exchange; None if it did not answer.
    """
    rows = [skip("ports", "did not answer", host) for host, answer in answers.items() if answer is None]
    # (the host that connects, the host that listens): why the connection failed.
    by_caller = {caller: answer["missing"] for caller, answer in answers.items() if answer}
    missing = {(caller, called): why for caller, found in by_caller.items() for called, why in found.items()}
    while missing:
        # The host in most of the failed connections; of two with equally many, the one that was called more often.
        counts, asked = Counter(host for pair in missing for host in pair), Counter(host for _, host in missing)
        host = max(counts, key=lambda host: (counts[host], asked[host]))
        callers = [caller for caller, called in missing if called == host]
        called = [called for caller, called in missing if caller == host]
        reason = next(reason for pair, reason in missing.items() if host in pair)
        found = [f"{', '.join(callers)} cannot reach its port {ports[host]}" if callers else ""]
        found += [f"it cannot reach high ports of {', '.join(called)}" if called else ""]
        others = ",".join(endpoints[other].address for other in dict.fromkeys([*callers, *called]))
        fix = f"on {host}: open TCP ports 1024-65535 to these: iptables -I INPUT -p tcp -s {others} -j ACCEPT"
        rows.append(fail("ports", host, f"{'; '.join(filter(None, found))} ({reason})", fix))
        missing = {pair: reason for pair, reason in missing.items() if host not in pair}
    return all_or(rows, "ports", f"free ports are reachable between {len(endpoints)} hosts, in both directions")
