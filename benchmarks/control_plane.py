"""What rank 0's watchdog costs with many ranks: real connections to its hub, from light-weight members.

    python -m benchmarks.control_plane --members 256,1024

A process of its own plays the other ranks: it joins, sends beats as often as ranks do, and notes when it is
told that a member is gone. The hub is the product's, in this process, and so is rank 0's member.
"""

import argparse
import multiprocessing
import os
import resource
import selectors
import socket
import sys
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection as Pipe
from statistics import median
from typing import Any

from hvtrain.watchdog.connections import Kind, Lines, encode, proof
from hvtrain.watchdog.hub import Hub
from hvtrain.watchdog.member import Member
from hvtrain.watchdog.progress import Progress, Rules
from hvtrain.watchdog.starting import beat_seconds, listen

TOKEN = "token"
ABORT_SECONDS = 600.0


class Members:
    """Ranks 1 to size - 1, in one process and one thread.

    Args:
        address: Of the hub.
        size: Number of ranks, with rank 0.
        seconds: Between the beats of a rank.
        report: Gets what the members saw.
    """

    def __init__(self, address: tuple[str, int], size: int, seconds: float, report: Pipe) -> None:
        self.seconds = seconds
        self.report = report
        self.selector = selectors.DefaultSelector()
        self.lines: dict[int, Lines] = {}
        self.sockets: dict[int, socket.socket] = {}
        self.status = vars(Progress().look())
        began = time.monotonic()
        for rank in range(1, size):
            connection = socket.create_connection(address)
            connection.setblocking(False)
            self.sockets[rank] = connection
            self.lines[rank] = Lines()
            self.selector.register(connection, selectors.EVENT_READ, rank)
        self.joined = 0
        while self.joined < size - 1:
            self.read(1.0)
        report.send(time.monotonic() - began)

    def send(self, rank: int, message: dict[str, Any]) -> None:
        self.sockets[rank].send(encode(message))

    def read(self, seconds: float) -> bool:
        """Takes messages for so long at most. Returns True once a member has been told to stop."""
        for key, _ in self.selector.select(seconds):
            rank = key.data
            for message in self.lines[rank].feed(key.fileobj.recv(1 << 16)):  # type: ignore[union-attr]
                if message["kind"] == Kind.CHALLENGE:
                    answer = proof(TOKEN, message["challenge"], rank)
                    host = f"host{rank // 8}"
                    process = {"machine": host, "number": os.getpid(), "started": 0.0, "stacks": -1}
                    self.send(
                        rank,
                        {
                            "rank": rank,
                            "host": host,
                            "proof": answer,
                            "process": process,
                            "status": self.status,
                        },
                    )
                elif message["kind"] == Kind.WELCOME:
                    self.joined += 1
                elif message["kind"] == Kind.STOP:
                    return True
        return False

    def beat(self, seconds: float) -> None:
        """Sends beats for so long, spread over time as those of ranks are; then one member dies, and all are told."""
        ranks = list(self.sockets)
        began = time.monotonic()
        sent = 0
        while time.monotonic() - began < seconds:
            due = int((time.monotonic() - began) / self.seconds * len(ranks))
            for number in range(sent, due):
                self.send(ranks[number % len(ranks)], {"kind": Kind.BEAT, "status": self.status})
            sent = max(sent, due)
            self.read(self.seconds / len(ranks))

        dead = ranks[len(ranks) // 2]
        self.report.send(sent)
        died = time.monotonic()
        self.selector.unregister(self.sockets[dead])
        self.sockets[dead].close()
        while not self.read(1.0):
            pass
        self.report.send(time.monotonic() - died)


def play(
    address: tuple[str, int], size: int, seconds: float, duration: float, report: Pipe
) -> None:
    Members(address, size, seconds, report).beat(duration)


def measure(size: int, duration: float) -> dict[str, float]:
    """Returns the figures of one run with so many ranks."""
    seconds = beat_seconds(size, ABORT_SECONDS)
    member = Member(0, "host0", Rules(ABORT_SECONDS, seconds), Progress(), calls_launcher=False)
    listener = listen("127.0.0.1")
    assert listener
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    hub = Hub(listener, TOKEN, size, member)
    member.join(listener.getsockname(), TOKEN)
    parent, child = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(
        target=play, args=(listener.getsockname(), size, seconds, duration, child), daemon=True
    )
    process.start()

    join_seconds = parent.recv()
    clock = time.pthread_getcpuclockid(hub.thread.ident or 0)
    cpu = time.clock_gettime(clock)
    began = time.monotonic()
    beats = parent.recv()
    share = (time.clock_gettime(clock) - cpu) / (time.monotonic() - began)
    told_seconds = parent.recv()
    process.join()
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory
    member.stop()
    return {
        "members": size,
        "beat s": seconds,
        "beats": beats,
        "join s": join_seconds,
        "CPU % of a core": 100 * share,
        "MiB": grown / 1024,
        "dead named after s": told_seconds,
    }


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--members", default="256,1024", help="numbers of ranks (default: %(default)s)"
    )
    parser.add_argument(
        "--seconds", type=float, default=20.0, help="of beats (default: %(default)s)"
    )
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args(arguments)
    for size in map(int, options.members.split(",")):
        rows = [measure(size, options.seconds) for _ in range(options.rounds)]
        medians = {name: median(row[name] for row in rows) for name in rows[0]}
        print(", ".join(f"{name} {value:,.3g}" for name, value in medians.items()), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
