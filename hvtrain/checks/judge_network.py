"""Checks whether the hosts can resolve and reach each other: names, interfaces, ports. Pure functions."""

import ipaddress
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from hvtrain.checks.judge_hosts import Cluster, Facts, Problems, judge
from hvtrain.checks.table import Row, fail, passed, skip

_INTERFACE_FIX = (
    "give hosts in -H by their addresses in one network, or choose: --network-interfaces NAME"
)


@dataclass(frozen=True)
class Endpoint:
    """The endpoint at which other hosts reach a host: an interface, its IPv4 address and a free port."""

    interface: str
    address: str
    port: int


def judge_names(cluster: Cluster, names: Sequence[str]) -> list[Row]:
    """Checks that hostnames are unique, and that hosts resolve each other's names correctly.

    names: all names in -H.
    """
    # Horovod counts local ranks by hostname.
    owners: dict[str, str] = {}
    rows = []
    for host, facts in cluster.items():
        owner = owners.setdefault(facts["hostname"], host)
        if owner != host:
            finding = f"has the hostname {facts['hostname']}, as {owner} does; Horovod would treat them as one host"
            rows.append(fail("names", host, finding, f"on {host}: hostnamectl set-hostname {host}"))

    addresses = {name: _address(cluster, name) for name in cluster}

    def problems(host, facts):
        wrong_names = list(_name_problems(cluster, host, addresses))
        # One row for a host, however many names it resolves wrongly.
        for finding, fix in wrong_names[:1]:
            others = f" (and {len(wrong_names) - 1} more)" if len(wrong_names) > 1 else ""
            yield f"{finding}{others}", fix

    shown = ", ".join(f"{name} {address or 'unresolved'}" for name, address in addresses.items())
    if len(names) < 2:
        return [passed("names", shown)]
    return judge("names", cluster, problems, f"the same on every host: {shown}", rows)


def _address(cluster: Cluster, name: str) -> str | None:
    """Returns the address to which most hosts resolve a name.

    It is a loopback address only if there is no other; None if no host resolves the name.
    """
    addresses = [facts["addresses"][name] for facts in cluster.values() if facts["addresses"][name]]
    # A host often resolves its own name to 127.0.1.1 (Debian writes that to /etc/hosts).
    reachable = [address for address in addresses if not _is_loopback(address)]
    counts = Counter(reachable or addresses).most_common(1)
    return counts[0][0] if counts else None


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address).is_loopback


def _name_problems(
    cluster: Cluster,
    host: str,
    addresses: Mapping[str, str | None],
) -> Problems:
    """Yields a finding and its fix for each name that the host resolves wrongly.

    addresses: _address() of each name.
    """
    for name, usual in addresses.items():
        address = cluster[host]["addresses"][name]
        # The fix cannot be a loopback address, or one that no interface of the named host has.
        is_own = any(
            item["address"] == usual and not _is_loopback(item["address"])
            for item in cluster[name]["interfaces"]
        )
        fix = f"on {host}: write '{usual if is_own else 'ADDRESS'} {name}' into /etc/hosts, or add it to DNS"
        if address is None:
            yield f"has no address for {name}", fix
        elif address != usual:
            yield f"resolves {name} to {address} instead of {usual}", fix
        elif _is_loopback(address):
            yield f"resolves {name} to {address}, which other hosts cannot reach", fix
        elif not is_own:
            finding = f"resolves {name} to {address}, but no interface of {name} has that address"
            yield finding, f"{fix} (on {name}, ip -4 address lists its addresses)"


def judge_interfaces(
    cluster: Cluster,
    names: Sequence[str],
    interface_names: str | None = None,
) -> tuple[list[Row], dict[str, Endpoint]]:
    """Checks that each host has an interface in the first host's network.

    Args:
        cluster: The facts of the hosts that answered.
        names: All names in -H.
        interface_names: The value of --network-interfaces, names separated by commas.

    Returns:
        The rows, and the endpoint of each host that did not fail.
    """
    if len(names) < 2:
        return [passed("interface", "one host")], {}

    first = next(iter(cluster))
    chosen = interface_names.split(",") if interface_names else None
    first_address = _address(cluster, first)
    # The interface that the user chose, or else the one with the address of the host's name.
    first_interface = next(
        (
            item
            for item in cluster[first]["interfaces"]
            if not _is_loopback(item["address"])
            and (item["name"] in chosen if chosen else item["address"] == first_address)
        ),
        None,
    )
    if first_interface is None:
        finding = f"no interface has its address {first_address}"
        if first_address is None:
            finding = "no host resolves its name to an address"
        if interface_names:
            finding = f"has no interface {interface_names}"
        return [
            fail(
                "interface",
                first,
                f"{finding}; it has {_list_interfaces(cluster[first])}",
                _INTERFACE_FIX,
            )
        ], {}

    # All hosts must reach the first one: rank 0 is there, and all ranks connect to it.
    network = ipaddress.ip_network(first_interface["network"])
    endpoints: dict[str, Endpoint] = {}
    findings = {}
    for host, facts in cluster.items():
        interface = _interface_in(network, facts, chosen, _address(cluster, host))
        if interface is None:
            noun = f"interface {interface_names or ''}".rstrip()
            findings[host] = (
                f"no {noun} in {first}'s network {network}; it has {_list_interfaces(facts)}"
            )
            continue
        address = interface["address"]
        # Bridges such as docker0 have the same address on every host.
        owner = next(
            (other for other, endpoint in endpoints.items() if endpoint.address == address), None
        )
        if owner:
            findings[host] = (
                f"{interface['name']} has {address} here and on {owner}, so it does not connect the hosts"
            )
        else:
            endpoints[host] = Endpoint(interface["name"], address, facts["port"])

    rows = [fail("interface", host, finding, _INTERFACE_FIX) for host, finding in findings.items()]
    shown = ", ".join(sorted({endpoint.interface for endpoint in endpoints.values()}))
    return rows or [passed("interface", f"{shown} in {network}")], endpoints


def _interface_in(
    network: ipaddress.IPv4Network | ipaddress.IPv6Network,
    facts: Facts,
    names: list[str] | None,
    own_address: str | None,
) -> Mapping[str, str] | None:
    """Returns a host's interface in the network; None if the host has no such interface.

    Of several, the one with the address to which the host's name resolves is preferred.

    Args:
        network: The network.
        facts: The host's facts.
        names: The interfaces to choose from; None: all.
        own_address: The address to which the host's name resolves.
    """
    candidates = [
        item
        for item in facts["interfaces"]
        if ipaddress.ip_address(item["address"]) in network and (not names or item["name"] in names)
    ]
    return min(candidates, key=lambda item: item["address"] != own_address, default=None)


def _list_interfaces(facts: Facts) -> str:
    others = [item for item in facts["interfaces"] if item["name"] != "lo"]
    return ", ".join(f"{item['name']} {item['address']}" for item in others) or "only loopback"


def judge_ports(
    answers: Mapping[str, Facts],
    silent: Iterable[str],
    endpoints: Mapping[str, Endpoint],
) -> list[Row]:
    """Checks that each host reaches a free port of each other host.

    Failed connections are blamed on as few hosts as possible: first on the host involved in most of
    them, then in the same way for the remaining ones.

    Args:
        answers: The hosts' results of probe.exchange.
        silent: Hosts that did not answer.
        endpoints: The endpoint of each host.
    """
    rows = [skip("ports", "did not answer", host) for host in silent]

    # Why a connection failed, by the host that connects and the host that listens.
    missing = {
        (caller, listener): reason
        for caller, answer in answers.items()
        for listener, reason in answer["missing"].items()
    }
    while missing:
        counts = Counter(host for pair in missing for host in pair)
        # Of hosts with equally many failed connections, blame the one to which most were made.
        calls = Counter(listener for _, listener in missing)
        host = max(counts, key=lambda host: (counts[host], calls[host]))
        pairs = [pair for pair in missing if host in pair]
        connections = ", ".join(f"{caller} to {listener}" for caller, listener in pairs)
        finding = f"no connection from {connections} ({missing[pairs[0]]})"
        others = dict.fromkeys(other for pair in pairs for other in pair if other != host)
        addresses = ", ".join(endpoints[other].address for other in others)
        fix = f"on {host}: open TCP ports 1024-65535 to and from {addresses}"
        rows.append(fail("ports", host, finding, fix))
        missing = {pair: reason for pair, reason in missing.items() if host not in pair}

    finding = f"free ports are reachable between {len(endpoints)} hosts, in both directions"
    return rows or [passed("ports", finding)]
