"""The start of an elastic job: waits for its hosts, chooses the network, and says who is waited for.

Horovod's launcher waits without a word, and for a second host even where one is enough, to search for a network.
"""

import argparse
import os
import socket
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from horovod.runner.elastic import discovery, driver

from hvtrain.errors import ConfigError
from hvtrain.launch.job import parse_hosts
from hvtrain.launch.reach import is_local
from hvtrain.system import interfaces

DEFAULT_WAIT_SECONDS = 600  # Horovod's, for --elastic-timeout
# Ranks wait so long for one that joins. Horovod's 30 s end the job on a host that takes longer to load TensorFlow.
GLOO_TIMEOUT_SECONDS = 120
SECONDS_BEFORE_A_WORD = 2.0
SECONDS_BETWEEN_WORDS = 60.0


def prepare(args: argparse.Namespace) -> None:
    """Sets the interface in Horovod's arguments, once there are hosts enough.

    Raises ConfigError if the hosts do not come in time, or the discovery script fails.
    """
    wait_seconds = args.gloo_timeout_seconds or os.environ.get("HOROVOD_GLOO_TIMEOUT_SECONDS", GLOO_TIMEOUT_SECONDS)
    args.gloo_timeout_seconds = int(wait_seconds)
    hosts = {host.name: host.slots for host in parse_hosts(args.hosts)} if args.hosts else _wait_for_hosts(args)
    args.nics = args.nics or {_interface_towards(hosts)}
    start = driver.ElasticDriver._start_worker_processes

    def start_and_say(job: Any, slots: list[Any]) -> None:
        if slots and len(slots) < job.world_size():
            named = ", ".join(f"rank {slot.rank} on {slot.hostname}" for slot in slots)
            _say(f"starting {named}; the others wait, {wait_seconds} s at most (--gloo-timeout-seconds)")
        start(job, slots)

    driver.ElasticDriver._start_worker_processes = start_and_say


def _wait_for_hosts(args: argparse.Namespace) -> Mapping[str, int]:
    """The hosts that the discovery script lists, with their slots."""
    script = discovery.HostDiscoveryScript(args.host_discovery_script, args.slots or 1)
    limit = args.elastic_timeout or int(os.environ.get("HOROVOD_ELASTIC_TIMEOUT", DEFAULT_WAIT_SECONDS))
    began, next_word = time.monotonic(), SECONDS_BEFORE_A_WORD
    while True:
        try:
            hosts = script.find_available_hosts_and_slots()
        except (RuntimeError, ValueError) as error:
            raise ConfigError(
                f"--host-discovery-script {args.host_discovery_script} failed: {' '.join(str(error).split())}; "
                "it must print a line HOST:SLOTS for each host, and exit with 0"
            ) from error
        if sum(hosts.values()) >= args.num_proc:
            return hosts
        waited = time.monotonic() - began
        listed = " ".join(f"{name}:{slots}" for name, slots in sorted(hosts.items())) or "no host"
        about = f"{args.num_proc} slots (-np), and {args.host_discovery_script} lists {listed}"
        if waited >= limit:
            raise ConfigError(f"waited {limit} s (--elastic-timeout) for {about}; make hosts available, or lower -np")
        if waited >= next_word:
            next_word += SECONDS_BETWEEN_WORDS
            _say(f"waiting for {about}; gives up after {limit} s (--elastic-timeout)")
        time.sleep(1)


def _interface_towards(hosts: Mapping[str, int]) -> str:
    """This host's interface that leads to the first of the other hosts, or that holds the address of this one."""
    for host in sorted(hosts, key=is_local):
        with suppress(OSError):
            if name := interfaces.interface_of(interfaces.address_towards(socket.gethostbyname(host))):
                return name
    raise ConfigError(f"no interface leads to {', '.join(hosts)}; give the one that does with --network-interfaces")


def _say(text: str) -> None:
    sys.stderr.write(f"hvtrain: {text}\n")
    sys.stderr.flush()
