"""What many ranks cost the processes that serve all of them: watchdog, rendezvous, output and checks.

    python -m benchmarks.control_plane --members 256,1024

- watchdog: a process of its own plays the other ranks. It joins, sends beats as often as ranks do, and notes when it
  is told that a member is gone. The hub is the product's, in this process, and so is rank 0's member.
- rendezvous: another process claims all ranks, stores an address for each, and asks for addresses. Gloo's ranks ask for
  all others, so their number of requests grows with the square of the ranks; the time of one is measured.
- output: the launcher's reader gets lines of all ranks, and writes their logs.
- checks: before the first step each rank gets a digest of every rank's settings and code, and compares them.
"""

import argparse
import http.client
import json
import multiprocessing
import os
import resource
import selectors
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr
from multiprocessing.connection import Connection as Pipe
from multiprocessing.process import BaseProcess
from pathlib import Path
from statistics import median
from typing import Any

from hvtrain.config.compose import compose
from hvtrain.config.schema import from_dict
from hvtrain.launch.output import RankOutput
from hvtrain.launch.rendezvous import Rendezvous
from hvtrain.training.consistency import check_same_run
from hvtrain.watchdog.connections import Kind, MessageDecoder, encode, proof
from hvtrain.watchdog.hub import Hub
from hvtrain.watchdog.member import Member
from hvtrain.watchdog.progress import Progress, Rules
from hvtrain.watchdog.starting import beat_seconds, listen

TOKEN = "token"
ABORT_SECONDS = 600.0
# Requests for an address, and lines of each rank: enough to time one.
ASKED = 10_000
LINES = 20


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
        self.decoders: dict[int, MessageDecoder] = {}
        self.sockets: dict[int, socket.socket] = {}
        self.status = vars(Progress().status())
        began = time.monotonic()
        for rank in range(1, size):
            connection = socket.create_connection(address)
            connection.setblocking(False)
            self.sockets[rank] = connection
            self.decoders[rank] = MessageDecoder()
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
            for message in self.decoders[rank].feed(key.fileobj.recv(1 << 16)):  # type: ignore[union-attr]
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


def start(play: Callable[..., None], *arguments: Any) -> tuple[BaseProcess, Pipe]:
    """Starts a function in a process of its own, and returns the end of the pipe to which it reports."""
    parent, child = multiprocessing.Pipe()
    context = multiprocessing.get_context("spawn")
    process = context.Process(target=play, args=(*arguments, child), daemon=True)
    process.start()
    return process, parent


def measure_watchdog(size: int, duration: float) -> dict[str, float]:
    seconds = beat_seconds(size, ABORT_SECONDS)
    member = Member(0, "host0", Rules(ABORT_SECONDS, seconds), Progress(), calls_launcher=False)
    listener = listen("127.0.0.1")
    assert listener
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    hub = Hub(listener, TOKEN, size, member)
    member.join(listener.getsockname(), TOKEN)
    process, parent = start(play, listener.getsockname(), size, seconds, duration)

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


def play_rendezvous(port: int, size: int, report: Pipe) -> None:
    """Claims all ranks twice, then asks for ASKED addresses; says when each of the two is done."""
    names = [f"rank {rank}" for rank in range(size)]
    # Whoever came before the last one is told the hosts of all at the second claim.
    for rank in [*range(size), *range(size)]:
        claim = {"rank": rank, "names": names, "host": ["host", "127.0.0.1"], "process": rank}
        status = send(port, "POST", "/claim", json.dumps(claim).encode())
    report.send(status)

    send(port, "PUT", "/global/0", b"x" * 64)
    for _ in range(ASKED):
        status = send(port, "GET", "/global/0")
    report.send(status)


def send(port: int, method: str, path: str, body: bytes | None = None) -> int:
    """Sends a request as a rank does, in a connection of its own; returns the status of the answer."""
    connection = http.client.HTTPConnection("127.0.0.1", port)
    connection.request(method, path, body)
    response = connection.getresponse()
    response.read()
    connection.close()
    return response.status


def measure_rendezvous(size: int) -> dict[str, float]:
    """Returns the CPU time that a claim and a question for an address cost the server."""
    server = Rendezvous("127.0.0.1", 0, [f"rank {rank}" for rank in range(size)])
    server.serve()
    process, parent = start(play_rendezvous, server.server_port, size)
    began = time.process_time()
    assert parent.recv() == 200
    claimed = time.process_time()
    assert parent.recv() == 200
    asked = time.process_time()
    process.join()
    server.close()
    return {
        "CPU us of a claim": 1e6 * (claimed - began) / (2 * size),
        "of an address": 1e6 * (asked - claimed) / ASKED,
    }


def measure_output(size: int) -> dict[str, float]:
    """Returns the CPU time that a line of a rank costs the launcher."""
    lines = [
        f"[1,{rank}]<stderr>:a warning of rank {rank}\n"
        for _ in range(LINES)
        for rank in range(size)
    ]
    with tempfile.TemporaryDirectory() as folder, Path(os.devnull).open("w") as nowhere:
        output = RankOutput(Path(folder), [f"host{rank // 8}" for rank in range(size)])
        with redirect_stderr(nowhere):
            began = time.process_time()
            output.read(lines)
            seconds = time.process_time() - began
    return {"of a line": 1e6 * seconds / len(lines)}


class AlikeRanks:
    """Gives what a gather of so many ranks gives if all are alike."""

    def __init__(self, size: int) -> None:
        self.size = size

    def gather(self, value: Any) -> list[Any]:
        return [value] * self.size


def measure_checks(size: int) -> dict[str, float]:
    """Returns the CPU time in which a rank compares its settings and code with those of all ranks."""
    config = from_dict(compose([]))
    began = time.process_time()
    check_same_run(AlikeRanks(size), config)  # type: ignore[arg-type]
    return {"ms of the check before training": 1000 * (time.process_time() - began)}


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
        rows = [
            {
                **measure_watchdog(size, options.seconds),
                **measure_rendezvous(size),
                **measure_output(size),
                **measure_checks(size),
            }
            for _ in range(options.rounds)
        ]
        medians = {name: median(row[name] for row in rows) for name in rows[0]}
        print(", ".join(f"{name} {value:,.3g}" for name, value in medians.items()), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
