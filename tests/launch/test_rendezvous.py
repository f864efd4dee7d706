"""The server through which Gloo's ranks find each other, as horovodrun of hvtrain changes it. No rank is started."""

import http.client
import queue
import socket
import threading
from types import SimpleNamespace

import pytest
from horovod.runner.http import http_server

from hvtrain.launch import horovod_changes as changes
from hvtrain.launch.rendezvous import Rendezvous

ORIGINAL = http_server.RendezvousHandler.do_DELETE
ORIGINAL_PROCESS = http_server.RendezvousHTTPServer.process_request
ADDRESS = b"x" * 3000
# Two ranks on one host: the scope of ranks that have this local rank holds one.
PLAN = [SimpleNamespace(hostname="s1", size=2, local_size=2, local_rank=rank, cross_size=1) for rank in range(2)]


@pytest.fixture
def ask(monkeypatch):
    """Sends a request to a server: method, scope, rank and, for PUT, an address; returns the status and the answer."""
    monkeypatch.setattr(http_server.RendezvousHandler, "do_DELETE", changes._forgetting(ORIGINAL))
    at_once = changes._answering_at_once(ORIGINAL_PROCESS)
    monkeypatch.setattr(http_server.RendezvousHTTPServer, "process_request", at_once)
    server = http_server.RendezvousServer()
    port = server.start()
    server.init(PLAN)

    def send(method, scope, rank, address=None):
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
        connection.request(method, f"/{scope}/{rank}", address)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()

    yield send
    server.stop()


@pytest.mark.parametrize("order", [[("local_s1", 0), ("cross_0", 0), ("local_s1", 1), ("cross_1", 0)],
                                   [("local_s1", 1), ("local_s1", 0), ("cross_1", 0), ("cross_0", 0)]])  # fmt: skip
def test_ranks_that_start_again_find_no_address_of_before(ask, order):
    """In the first order rank 0 is through with all its scopes before rank 1 says so of their host's."""
    for turn in ("first", "second"):
        for scope, rank in order:
            assert ask("GET", scope, rank)[0] == 404, "or a rank would connect to a port that is closed"
            assert ask("PUT", scope, rank, f"{turn} address of {rank}")[0] == 200
        for scope, rank in order:
            assert ask("GET", scope, rank) == (200, f"{turn} address of {rank}")
        for scope, rank in order:
            assert ask("DELETE", scope, rank)[0] == 200


def test_addresses_stay_until_the_last_rank_is_through(ask):
    for rank in range(2):
        ask("PUT", "global", rank, f"address of {rank}")
    ask("DELETE", "global", 0)
    assert ask("GET", "global", 0) == (200, "address of 0")
    ask("DELETE", "global", 1)
    assert ask("GET", "global", 0)[0] == ask("GET", "global", 1)[0] == 404


def test_scopes_of_other_groups_of_ranks_are_horovods(ask):
    ask("PUT", "global_process_set_1", 0, "an address")
    ask("DELETE", "global_process_set_1", 0)
    assert ask("GET", "global_process_set_1", 0)[0] == 404


@pytest.fixture(params=["horovodrun", "started by hand"])
def server(request, monkeypatch):
    """A server that listens, holds rank 7's address, and does not answer yet."""
    at_once = changes._answering_at_once(ORIGINAL_PROCESS)
    monkeypatch.setattr(http_server.RendezvousHTTPServer, "process_request", at_once)
    if request.param == "horovodrun":
        made = http_server.RendezvousHTTPServer(("127.0.0.1", 0), http_server.RendezvousHandler, 0)
        made.init(PLAN)
        made.cache["global"] = {"7": ADDRESS}
    else:
        made = Rendezvous("127.0.0.1", 0, ["rank 0"])
        made.put("global", "7", ADDRESS)
    yield made
    made.shutdown()
    made.server_close()


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
    monkeypatch.setattr(server, "process_request_thread", watched(server.process_request_thread, started))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    answers = [read(connection) for connection in connections[:2]]
    assert started.get(timeout=10) == connections[2].getsockname(), "of the question that comes in two parts"
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
