"""The server through which Gloo's ranks find each other, as horovodrun of hvtrain changes it. No rank is started."""

import http.client
from types import SimpleNamespace

import pytest
from horovod.runner.http import http_server

from hvtrain.horovodrun import changes

ORIGINAL = http_server.RendezvousHandler.do_DELETE
# Two ranks on one host: the scope of ranks that have this local rank holds one.
PLAN = [SimpleNamespace(hostname="s1", size=2, local_size=2, local_rank=rank, cross_size=1) for rank in range(2)]


@pytest.fixture
def ask(monkeypatch):
    """Sends a request to a server: method, scope, rank and, for PUT, an address; returns the status and the answer."""
    monkeypatch.setattr(http_server.RendezvousHandler, "do_DELETE", changes._forgetting(ORIGINAL))
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
