"""A server of objects as S3 is, and a relay before it that counts requests and makes faults."""

from __future__ import annotations

import http.client
import re
import subprocess
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from pyarrow import fs

PACKAGES = Path(sysconfig.get_path("data")) / "share" / "object-store"
SERVER = """
import sys
from moto.server import ThreadedMotoServer
server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
server.start()
print(server.get_host_and_port()[1], flush=True)
sys.stdin.read()
"""


@dataclass(frozen=True)
class Request:
    """A request as the relay saw it; `first` and `last` are of its range of bytes, if it has one."""

    method: str
    path: str
    first: int | None
    last: int | None


@dataclass
class Store:
    """The store, at the relay's port.

    code: Of the errors 4xx that the relay answers with.
    fault: Called with each request before it goes on; returns None, or the fault: an HTTP status, "cut" (half of the
        body, then the end), "stall" (half of the body, then silence).
    """

    port: int
    environment: dict[str, str]
    requests: list[Request] = field(default_factory=list)
    fault: Callable[[Request], object] = lambda request: None
    code: str = "AccessDenied"

    def put(self, source: Path, address: str) -> str:
        """Copies a local file or folder to BUCKET/PATH; returns its address."""
        filesystem = self.filesystem()
        files = (
            [source] if source.is_file() else [path for path in source.rglob("*") if path.is_file()]
        )
        for file in files:
            name = "" if file == source else f"/{file.relative_to(source).as_posix()}"
            with filesystem.open_output_stream(f"{address}{name}") as stream:
                stream.write(file.read_bytes())
        return f"s3://{address}"

    def filesystem(self) -> fs.FileSystem:
        return fs.S3FileSystem(
            access_key="test",
            secret_key="test",
            endpoint_override=f"127.0.0.1:{self.port}",
            scheme="http",
        )

    def send(self, method: str, path: str, body: bytes = b"") -> None:
        """A request without pyarrow, which faults can make too."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port)
        connection.request(method, f"/{path}", body)
        assert connection.getresponse().status < 300
        connection.close()

    def bucket(self, name: str) -> str:
        self.send("PUT", name)
        return name


@contextmanager
def object_store() -> Iterator[Store]:
    if not PACKAGES.is_dir():
        pytest.skip("moto (scripts/lock/object-store.txt) is missing")
    command = [sys.executable, "-c", SERVER]
    environment = {"PYTHONPATH": str(PACKAGES), "PATH": "/usr/bin:/bin"}
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command, env=environment, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True
    ) as server:
        try:
            line = server.stdout.readline()
            while not line.strip().isdigit():
                assert line, "the server has ended"
                line = server.stdout.readline()
            relay = _relay(int(line))
            port = relay.server_address[1]
            relay.store = Store(
                port,
                {
                    "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
                    "AWS_ACCESS_KEY_ID": "test",
                    "AWS_SECRET_ACCESS_KEY": "hunter2hunter2",
                    "AWS_EC2_METADATA_DISABLED": "true",
                },
            )
            thread = threading.Thread(target=relay.serve_forever, daemon=True)
            thread.start()
            yield relay.store
            relay.shutdown()
            relay.server_close()
        finally:
            server.stdin.close()
            server.wait()


def _relay(server_port: int) -> ThreadingHTTPServer:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        # Headers and body are two writes, and the second would wait for an acknowledgement.
        disable_nagle_algorithm = True

        def handle_any(self) -> None:
            store = self.server.store
            body = self._body()
            match = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
            first, last = map(int, match.groups()) if match else (None, None)
            request = Request(self.command, self.path, first, last)
            store.requests.append(request)
            fault = store.fault(request)
            if isinstance(fault, int):
                code = {500: "InternalError", 503: "SlowDown"}.get(fault, store.code)
                content = f"<Error><Code>{code}</Code><Message>no</Message></Error>".encode()
                self._answer(fault, [("Content-Type", "application/xml")], content, len(content))
                return

            connection = http.client.HTTPConnection("127.0.0.1", server_port)
            headers = {
                name: value for name, value in self.headers.items() if name.lower() not in HOP
            }
            connection.request(self.command, self.path, body, headers)
            response = connection.getresponse()
            content = response.read()
            headers = [
                pair
                for pair in response.getheaders()
                if pair[0].lower() not in {*HOP, "content-length"}
            ]
            num_bytes = int(response.getheader("Content-Length", len(content)))
            connection.close()
            if fault in ("cut", "stall"):
                content = content[: len(content) // 2]
            self._answer(response.status, headers, content, num_bytes)
            if fault == "stall":
                time.sleep(30)
            if fault:
                self.close_connection = True

        def _body(self) -> bytes:
            if self.headers.get("Transfer-Encoding", "") == "chunked":
                pieces = []
                while size := int(self.rfile.readline().split(b";")[0], 16):
                    pieces.append(self.rfile.read(size))
                    self.rfile.readline()
                self.rfile.readline()
                return b"".join(pieces)
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))

        def _answer(self, status: int, headers: list, content: bytes, num_bytes: int) -> None:
            self.send_response_only(status)
            for name, value in headers:
                self.send_header(name, value)
            self.send_header("Content-Length", str(num_bytes))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(content)

        do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = handle_any  # noqa: N815

        def log_message(self, *_: object) -> None:
            pass

    ThreadingHTTPServer.daemon_threads = True
    return ThreadingHTTPServer(("127.0.0.1", 0), Handler)


HOP = {"connection", "transfer-encoding", "expect", "keep-alive", "host"}
