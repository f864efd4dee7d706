"""The process that sends the notice of a run's end by apprise. Rank 0 starts it, with the number of its own process.

It reads rank 0's messages, lines of JSON, from its standard input: first {"addresses", "name", "folder", "lost"}, then
each notice {"kind", "body"} that is to be sent if rank 0 ends now; "is_last" sends it at once. It answers twice, on its
standard output: with the indices of addresses that apprise does not know, and of those that did not take the notice.

No launcher knows of it: it has a session of its own, no parent and no variable of the launch, by which launchers find
what they kill. It ends by itself, SECONDS_TO_SEND after rank 0 at the latest.
"""

import json
import os
import select
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

SECONDS_TO_SEND = 8.0
FINISHED, STOPPED, FAILED, LOST = "finished", "stopped", "failed", "lost"
TITLES = {
    FINISHED: "{} has finished",
    STOPPED: "{} was stopped",
    FAILED: "{} has failed",
    LOST: "{} has ended, and did not say why",
}
_TYPES = {FINISHED: "success", STOPPED: "warning"}


def main() -> None:
    """Waits for the end of rank 0, and sends what it said last."""
    if os.fork():
        os._exit(0)
    messages = read(0, int(sys.argv[1]))
    begin = next(messages, None)
    if begin is None:
        return
    import apprise

    servers = [apprise.Apprise.instantiate(address) for address in begin["addresses"]]
    unknown = [index for index, server in enumerate(servers) if server is None]
    answer(unknown)
    if unknown:
        return
    notice = {"kind": LOST, "body": begin["lost"]}
    for notice in messages:
        if notice.get("is_last"):
            break
    title = TITLES[notice["kind"]].format(begin["name"])
    body = f"{notice['body']}\n{begin['folder']}"
    notify_type = apprise.NotifyType(_TYPES.get(notice["kind"], "failure"))
    answer(send(servers, title=_clean(title), body=_clean(body), notify_type=notify_type))
    os._exit(0)  # A thread may still wait for a server.


def read(pipe: int, process: int) -> Iterator[dict[str, Any]]:
    """Yields messages until the pipe is closed or the process ends, whose forked children may keep the pipe open."""
    end = []
    # It may have ended; kernels before Linux 5.3, and Pythons built with older headers, do not have it.
    with suppress(OSError, AttributeError):
        end = [os.pidfd_open(process)]
    text = b""
    while True:
        ready = select.select([pipe, *end], [], [])[0]
        data = os.read(pipe, 1 << 16) if pipe in ready else b""
        if not data:
            return
        *lines, text = (text + data).split(b"\n")
        yield from map(json.loads, lines)


def send(servers: Sequence[Any], seconds: float = SECONDS_TO_SEND, **notice: Any) -> list[int]:
    """Sends the notice to all servers at once. Returns the indices of those that have not taken it in time."""
    taken: set[int] = set()

    def send_to(index: int) -> None:
        if servers[index].notify(**notice):
            taken.add(index)

    threads = [threading.Thread(target=send_to, args=[index], daemon=True) for index in range(len(servers))]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + seconds
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    return [index for index in range(len(servers)) if index not in taken]


def answer(indices: list[int]) -> None:
    """Writes a line, if rank 0 is still there to read it."""
    with suppress(BrokenPipeError):
        os.write(1, json.dumps(indices).encode() + b"\n")


def _clean(text: str) -> str:
    """Replaces what cannot be sent: names of files may hold any bytes."""
    return text.encode(errors="replace").decode()


if __name__ == "__main__":
    main()
