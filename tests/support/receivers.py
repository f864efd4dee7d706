"""Local servers that take notices: one for mail, which asks for a password, and a webhook, which does too."""

from __future__ import annotations

import base64
import email
import email.policy
import json
import logging
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

USER, SECRET = "me", "hunter2"


class Received:
    """What came, as (kind, title, body) of the webhook and (subject, body) of the mail server."""

    def __init__(self, mail: str, webhook: str) -> None:
        self.mail, self.webhook = mail, webhook
        self.mails: list[tuple[str, str]] = []
        self.posts: list[tuple[str, str, str]] = []

    def only_post(self, about: str, seconds: float = 20) -> tuple[str, str]:
        """Kind and body of the one notice to the webhook whose title is this, once it has come."""
        deadline = time.monotonic() + seconds
        while not (matches := [(kind, body) for kind, title, body in self.posts if title == about]):
            assert time.monotonic() < deadline, f"no notice {about!r}, but {self.posts}"
            time.sleep(0.05)
        assert len(matches) == 1
        return matches[0]


@contextmanager
def receiving() -> Iterator[Received]:
    """Both servers, with addresses for apprise that hold SECRET."""
    from aiosmtpd.controller import Controller
    from aiosmtpd.smtp import AuthResult

    class Mails:
        async def handle_DATA(self, server: Any, session: Any, envelope: Any) -> str:  # noqa: N802
            if not session.authenticated:
                return "530 a password is needed"
            message = email.message_from_bytes(envelope.content, policy=email.policy.default)
            text = message.get_body(("plain", "html")).get_content()
            received.mails.append((message["Subject"], text))
            return "250 OK"

    def login(server: Any, session: Any, envelope: Any, mechanism: str, credentials: Any) -> Any:
        return AuthResult(
            success=(credentials.login, credentials.password) == (USER.encode(), SECRET.encode())
        )

    class Posts(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            expected = "Basic " + base64.b64encode(f"{USER}:{SECRET}".encode()).decode()
            notice = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if is_known := self.headers["Authorization"] == expected:
                received.posts.append((notice["type"], notice["title"], notice["message"]))
            self.send_response(200 if is_known else 401)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            """Says nothing."""

    mail_port = free_port()
    # It warns that passwords come without TLS.
    logging.getLogger("mail.log").setLevel(logging.ERROR)
    mails = Controller(Mails(), "127.0.0.1", mail_port, authenticator=login, auth_require_tls=False)
    posts = ThreadingHTTPServer(("127.0.0.1", 0), Posts)
    received = Received(
        f"mailto://{USER}:{SECRET}@127.0.0.1:{mail_port}?from=runs@lab.org&to=you@lab.org&mode=insecure",
        f"json://{USER}:{SECRET}@127.0.0.1:{posts.server_port}/notices",
    )
    mails.start()
    threading.Thread(target=posts.serve_forever, daemon=True).start()
    try:
        yield received
    finally:
        mails.stop()
        posts.shutdown()
        posts.server_close()


def free_port() -> int:
    """A port at which nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])
