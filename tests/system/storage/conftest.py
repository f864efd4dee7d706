"""store: a server of objects, started once for a file, with no fault and no request yet."""

from __future__ import annotations

import pytest

from hvtrain.system.storage import cache, remote
from object_store import object_store


@pytest.fixture(scope="module")
def server():
    with object_store() as store:
        yield store


@pytest.fixture
def store(server, monkeypatch, tmp_path_factory):
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("HVTRAIN_CACHE", str(tmp_path_factory.mktemp("cache")))
    monkeypatch.setattr(remote, "SECONDS_BEFORE_RETRIES", (0.01,) * 5)
    remote._filesystem.cache_clear()
    cache.forget_copies()
    server.fault = lambda request: None
    server.code = "AccessDenied"
    server.requests.clear()
    yield server
    cache._locks.clear()
