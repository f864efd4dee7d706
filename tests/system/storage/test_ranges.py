"""Parts of objects that are read before they are asked for."""

import threading

import pytest

from hvtrain.system.storage import ranges
from hvtrain.system.storage.ranges import ReadAhead


def test_announced_parts_are_read_at_the_same_time_and_once():
    together = threading.Barrier(4, timeout=20)
    calls = []

    def read(name: str) -> str:
        calls.append(name)
        together.wait()
        return name.upper()

    ahead = ReadAhead(read)
    ahead.announce("abcd")
    ahead.announce("ab")
    assert [ahead.take(name) for name in "dcba"] == list("DCBA")
    assert sorted(calls) == list("abcd")


def test_a_part_that_was_not_announced_or_has_gone_is_read_when_it_is_taken(monkeypatch):
    monkeypatch.setattr(ranges, "MAX_AHEAD", 2)
    calls = []

    def read(name: str) -> str:
        calls.append(name)
        return name.upper()

    ahead = ReadAhead(read)
    assert ahead.take("x") == "X"
    ahead.announce("abc")
    assert [ahead.take(name) for name in "abc"] == ["A", "B", "C"]
    assert calls.count("b") == calls.count("c") == 1
    assert not ahead._parts


def test_a_failure_is_raised_where_the_part_is_taken_and_does_not_last():
    errors = [OSError("slow down")]

    def read(name: str) -> str:
        if errors:
            raise errors.pop()
        return name

    ahead = ReadAhead(read)
    ahead.announce("ab")
    with pytest.raises(OSError, match="slow down"):
        ahead.take("a")
    assert not ahead._parts, "nobody waits for what else was announced"
    assert ahead.take("a") == "a"
