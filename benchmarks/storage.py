"""Batches of two ranks from object storage whose answers take 20 ms, against the same files in a folder.

    python -m benchmarks.storage                    3,000 JPEG files of 375x500, in TFRecord, Parquet and tar files too
    python -m benchmarks.storage --kinds webdataset --rounds 1

Both take turns. Each start has a cache of its own, which is empty. Epochs count from the first batch on; what comes
before it, from the opening of the data set, stands apart. The store is a small server on this host that waits before
it answers. A real store takes none of the ranks' cores, so this one has a core of its own, and the ranks share the
others, in a folder too.
"""

import argparse
import asyncio
import json
import os
import re
import statistics
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
from collections.abc import Sequence
from datetime import datetime, timezone
from email.utils import formatdate
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import cast
from urllib.parse import parse_qs

from benchmarks.input import NUM_CLASSES, NUM_RECORD_FILES, TRAINED, write_images

KINDS = ("image_folder", "tfrecord", "parquet", "webdataset")
BATCH_SIZE = 32
EPOCHS = 3
CHANGED = 1_800_000_000
LAST_MODIFIED = f"Last-Modified: {formatdate(CHANGED, usegmt=True)}"
SHAPE = str(list(TRAINED)).replace(" ", "")
# About the size of ImageNet's photographs.
HEIGHT, WIDTH = 375, 500


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--images", type=int, default=3000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--milliseconds", type=float, default=20.0, help="of each answer (default: 20)"
    )
    parser.add_argument("--read", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.read:
        *what, rank = options.read
        read(*what, int(rank))
        return 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_images(folder, options.images, HEIGHT, WIDTH)
        write_shards(folder)
        store_core, *rank_cores = os.sched_getaffinity(0)
        # The server's thread inherits this.
        os.sched_setaffinity(0, {store_core})
        port = serve(folder, options.milliseconds / 1000)
        ratios: dict[str, list[list[float]]] = {kind: [] for kind in options.kinds}
        for kind in options.kinds * options.rounds:
            near, far = (
                epochs_of(kind, folder / kind, address, port, rank_cores or [store_core])
                for address in (str(folder / kind), f"s3://bucket/{kind}")
            )
            ratios[kind].append([here / there for here, there in zip(near[1:], far[1:])])
            print(
                f"{kind}: seconds to the first batch, of the first epoch and of a later one: "
                f"in a folder {near}, in the store {far}",
                flush=True,
            )
    print(f"{'store / folder':16}{'first epoch':>14}{'later':>10}")
    for kind, rounds in ratios.items():
        first, second = (statistics.median(values) for values in zip(*rounds))
        print(f"{kind:16}{first:>14.2f}{second:>10.2f}")
    return 0


def write_shards(folder: Path) -> None:
    (folder / "webdataset").mkdir()
    images = sorted((folder / "image_folder" / "train").rglob("*.jpg"), key=lambda path: path.name)
    for number in range(NUM_RECORD_FILES):
        with tarfile.open(folder / "webdataset" / f"train-{number}.tar", "w") as tar:
            for path in images[number::NUM_RECORD_FILES]:
                label = path.with_suffix(".cls")
                label.write_text(path.parent.name.partition("_")[2])
                tar.add(path, path.name)
                tar.add(label, label.name)
                label.unlink()


def epochs_of(
    kind: str, folder: Path, address: str, port: int, cores: Sequence[int]
) -> list[float]:
    """Returns the seconds to the first batch, of the first epoch and of a later one, on the slower of two ranks."""
    with tempfile.TemporaryDirectory() as cache:
        keys = dict.fromkeys(("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"), "benchmark")
        store = {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
            "AWS_EC2_METADATA_DISABLED": "true",
        }
        folders = {"HVTRAIN_CACHE": cache, "XDG_CACHE_HOME": cache, "TF_CPP_MIN_LOG_LEVEL": "2"}
        command = [sys.executable, "-m", "benchmarks.storage", "--read", kind, str(folder), address]
        ranks = [
            subprocess.Popen(
                [*command, str(rank)],
                env={**os.environ, **keys, **store, **folders},
                stdout=subprocess.PIPE,
                preexec_fn=partial(os.sched_setaffinity, 0, cores),
            )
            for rank in range(2)
        ]
        lines = [rank.communicate()[0].splitlines()[-1] for rank in ranks]
        return [round(max(seconds), 2) for seconds in zip(*map(json.loads, lines))]


def read(kind: str, folder: str, address: str, rank: int) -> None:
    """Reads three epochs of a rank, without a model, and prints their seconds; some of the folder first, untimed."""
    from hvtrain.config.compose import composed
    from hvtrain.config.instantiate import build
    from hvtrain.core.topology import Topology
    from hvtrain.data import StreamRequest
    from hvtrain.data.source import Source

    settings = [f"dataset={kind}", f"dataset.image_shape={SHAPE}"]
    if kind != "image_folder":
        settings.append(f"dataset.num_classes={NUM_CLASSES}")
    near, far = (composed([*settings, f"dataset.dir={place}"]) for place in (folder, address))
    for config, epochs in ((near, 0), (far, EPOCHS)):
        marks = [time.perf_counter()]
        source = build(config, "dataset", Source)
        steps = source.num_examples("train") // (2 * BATCH_SIZE)
        stream = source.training(StreamRequest(Topology(rank, 2, rank, 2), BATCH_SIZE, 0, 0, steps))
        for step, _ in enumerate(stream.take(epochs * steps or 1), start=1):
            if step == 1 or step % steps == 0:
                marks.append(time.perf_counter())
    opening, first, *others = [end - begin for begin, end in pairwise(marks)]
    print(json.dumps([opening, first, sum(others) / len(others)]))


def serve(folder: Path, seconds: float) -> int:
    """Starts a server that lists and reads files of a folder as S3 does, each answer so many seconds late.

    One thread serves all connections: a thread for each would take more of the cores than the ranks.

    Returns:
        Its port.
    """

    class Connection(asyncio.Protocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            self.transport = cast(asyncio.Transport, transport)
            self.received = b""

        def data_received(self, data: bytes) -> None:
            *requests, self.received = (self.received + data).split(b"\r\n\r\n")
            for request in requests:
                reply = answer(folder, request.decode())
                loop.call_later(seconds, self.transport.write, reply)

    loop = asyncio.new_event_loop()
    server = loop.run_until_complete(loop.create_server(Connection, "127.0.0.1", 0))
    threading.Thread(target=loop.run_forever, daemon=True).start()
    return int(server.sockets[0].getsockname()[1])


def answer(folder: Path, request: str) -> bytes:
    """Returns the response to a request for a list of files, or for a file or a part of it."""
    method, target, _ = request.split(" ", 2)
    path, _, query = target.removeprefix("/bucket").partition("?")
    file = Path(f"{folder}{path}")
    status = "200 OK"
    headers = [LAST_MODIFIED, 'ETag: "1"']
    part = re.search(r"range: bytes=(\d+)-(\d+)", request, re.IGNORECASE)

    if "list-type" in query:
        content = listing(folder, parse_qs(query).get("prefix", [""])[0])
    elif not file.is_file():
        status = "404 Not Found"
        content = b""
    elif part:
        first, last = map(int, part.groups())
        size = file.stat().st_size
        status = "206 Partial Content"
        headers.append(f"Content-Range: bytes {first}-{min(last, size - 1)}/{size}")
        with file.open("rb") as data:
            data.seek(first)
            content = data.read(last - first + 1)
    else:
        content = file.read_bytes()

    headers.append(f"Content-Length: {len(content)}")
    head = "\r\n".join([f"HTTP/1.1 {status}", *headers, "", ""]).encode()
    return head if method == "HEAD" else head + content


def listing(folder: Path, prefix: str) -> bytes:
    time_of_change = datetime.fromtimestamp(CHANGED, timezone.utc).isoformat()
    rows = [
        f"<Contents><Key>{path.relative_to(folder).as_posix()}</Key><Size>{path.stat().st_size}</Size>"
        f"<LastModified>{time_of_change}</LastModified></Contents>"
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.relative_to(folder).as_posix().startswith(prefix)
    ]
    return f"<ListBucketResult><KeyCount>{len(rows)}</KeyCount>{''.join(rows)}</ListBucketResult>".encode()


if __name__ == "__main__":
    sys.exit(main())
