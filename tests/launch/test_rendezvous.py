"""The store through which Gloo's ranks find each other, under horovodrun and by hand. No rank is started."""

import base64
import errno
import http.client
import pickle
import queue
import socket
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from socketserver import TCPServer
from types import SimpleNamespace

import pytest

from hvtrain.errors import ConfigError
from hvtrain.launch import horovod_changes as changes
from hvtrain.launch import rendezvous
from hvtrain.launch.rendezvous import Store

ADDRESS = b"x" * 3000


@pytest.fixture
def ask():
    """Sends a request to a store: method, scope, rank and, for PUT, an address; returns the status and the answer."""
    store = Store("127.0.0.1", 0)
    store.serve()
    yield asking(store.server_port)
    store.close()


def asking(port):
    def send(method, scope, rank, address=None):
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
        connection.request(method, f"/{scope}/{rank}", address)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()

    return send


@pytest.mark.parametrize("order", [[("local_s1", 0), ("cross_0", 0), ("local_s1", 1), ("cross_1", 0)],
                                   [("local_s1", 1), ("local_s1", 0), ("cross_1", 0), ("cross_0", 0)]])  # fmt: skip
def test_ranks_that_start_again_find_no_address_of_before(ask, order):
    """In the first order rank 0 is through with all its scopes before rank 1 says so of their host's."""
    for turn in ("first", "second"):
        for scope, rank in order:
            assert ask("GET", scope, rank)[0] == 404, (
                "or a rank would connect to a port that is closed"
            )
            assert ask("PUT", scope, rank, f"{turn} address of {rank}")[0] == 200
        for scope, rank in order:
            assert ask("GET", scope, rank) == (200, f"{turn} address of {rank}")
        for scope, rank in order:
            assert ask("DELETE", scope, rank)[0] == 200


def test_addresses_stay_until_the_last_rank_is_through(ask):
    """What a rank has stored under other keys than its number goes with them."""
    for rank in range(2):
        ask("PUT", "global", f"rank_{rank}", "s1")
        ask("PUT", "global", rank, f"address of {rank}")
    ask("DELETE", "global", 0)
    assert ask("GET", "global", 0) == (200, "address of 0")
    ask("DELETE", "global", 1)
    assert (
        ask("GET", "global", 0)[0]
        == ask("GET", "global", 1)[0]
        == ask("GET", "global", "rank_0")[0]
        == 404
    )


def test_scopes_of_other_groups_of_ranks(ask):
    ask("PUT", "global_process_set_1", 0, "an address")
    ask("DELETE", "global_process_set_1", 0)
    assert ask("GET", "global_process_set_1", 0)[0] == 404


def test_a_store_starts_without_a_name_server(monkeypatch):
    def lookup(*_):
        raise AssertionError("a lookup can take many seconds")

    monkeypatch.setattr(socket, "getfqdn", lookup)
    store = Store("127.0.0.1", 0)
    assert store.server_port == store.socket.getsockname()[1] > 0
    store.server_close()


def test_a_store_without_file_descriptors_pauses_before_it_accepts_again(monkeypatch):
    def fail(*_):
        raise OSError(errno.EMFILE, "Too many open files")

    pauses = []
    monkeypatch.setattr(rendezvous.time, "sleep", pauses.append)
    monkeypatch.setattr(TCPServer, "get_request", fail)
    store = Store("127.0.0.1", 0)
    with pytest.raises(OSError, match="Too many open files"):
        store.get_request()
    store.server_close()
    assert pauses == [rendezvous.SECONDS_AFTER_A_FAILED_ACCEPT]


class Driver:
    """Horovod's driver of an elastic job, as far as its store asks it."""

    def __init__(self):
        self.calls = []

    def record_ready(self, host, local_rank):
        self.calls.append(("ready", host, local_rank))

    def get_slot_info(self, host, local_rank):
        return SimpleNamespace(to_response_string=lambda: f"slot {local_rank} of {host}")

    def register_worker_server(self, host, local_rank, addresses, secret_key):
        self.calls.append((host, local_rank, addresses, secret_key))


def test_an_elastic_jobs_store_asks_the_driver_and_runs_no_pickled_code(
    monkeypatch, tmp_path, capfd
):
    """Horovod's own unpickles whatever is sent as a worker's address (CVE-2024-10190)."""
    monkeypatch.setattr(changes.Server, "address", "127.0.0.1")
    driver = Driver()
    server = changes.Server()
    send = asking(server.start(driver))
    assert send("GET", "rank_and_size", "s1:1") == (200, "slot 1 of s1")
    sent = base64.b64encode(pickle.dumps(({"eth0": [("10.0.0.1", 2222)]}, b"a key")))
    assert send("PUT", "worker_addresses", "s1:1", sent)[0] == 200
    assert driver.calls == [("ready", "s1", 1), ("s1", 1, {"eth0": [("10.0.0.1", 2222)]}, b"a key")]
    assert send("GET", "worker_addresses", "s1:1")[0] == 404, "nobody else learns the key"
    code = base64.b64encode(pickle.dumps((tmp_path.rmdir, b"a key")))
    with pytest.raises(http.client.RemoteDisconnected):
        send("PUT", "worker_addresses", "s1:2", code)
    assert tmp_path.exists() and len(driver.calls) == 2
    assert capfd.readouterr().err == (
        "hvtrain: dropped a request from 127.0.0.1 to this launch's port, since no rank sends such requests\n"
    )
    send("PUT", "global", 0, "an address")
    server.init(None)
    assert send("GET", "global", 0)[0] == 404, "in the next round all ranks meet anew"
    server.stop()


@pytest.fixture
def server():
    """A store that listens, holds rank 7's address, and does not answer yet."""
    store = Store("127.0.0.1", 0)
    store.put("global", "7", ADDRESS)
    yield store
    store.close()


def test_a_question_for_an_address_costs_no_thread(server, monkeypatch):
    """1,000 ranks ask a million times: with a thread for each question that took seven minutes and more."""
    questions = {
        b"GET /global/7 HTTP/1.1\r\nHost: h\r\n\r\n": b"200 OK",
        b"GET /global/8 HTTP/1.0\r\n\r\n": b"404 Not Found",
    }
    connections = [socket.create_connection(server.server_address, timeout=10) for _ in range(3)]
    for connection, question in zip(connections, questions):
        connection.sendall(question)
    connections[2].sendall(b"GET /global/7 HTT")  # The rest comes later.
    started = queue.SimpleQueue()
    monkeypatch.setattr(
        server, "process_request_thread", watched(server.process_request_thread, started)
    )
    threading.Thread(target=server.serve_forever, daemon=True).start()
    answers = [read(connection) for connection in connections[:2]]
    assert started.get(timeout=10) == connections[2].getsockname(), (
        "of the question that comes in two parts"
    )
    connections[2].sendall(b"P/1.1\r\n\r\n")
    answers.append(read(connections[2]))
    assert started.empty()
    for (head, body), status in zip(answers, [*questions.values(), b"200 OK"]):
        assert status in head
        assert body == (ADDRESS if status == b"200 OK" else b"")


def watched(call, calls):
    def called(request, client):
        calls.put(client)
        call(request, client)

    return called


def read(connection):
    """Head and body of an answer."""
    with connection:
        head, _, body = b"".join(iter(lambda: connection.recv(1 << 16), b"")).partition(b"\r\n\r\n")
    return head, body


def test_a_claim_at_another_web_server_is_refused_at_once():
    class OtherServer(BaseHTTPRequestHandler):
        def do_POST(self):
            self.send_response(404)
            self.end_headers()
            self.wfile.write(b'{"detail": "Not Found"}')

    with HTTPServer(("127.0.0.1", 0), OtherServer) as server:
        threading.Thread(target=server.handle_request, daemon=True).start()
        with pytest.raises(ConfigError, match="is not this run's rank 0; give the same"):
            rendezvous.claim(
                server.server_address, 1, ["rank 0", "rank 1"], ["s1", "10.0.0.1"], 60.0
            )
