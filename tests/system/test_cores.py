"""A host's cores, shared out; `pin_to_cores` in processes of its own, for it holds for all that comes after."""

import json
import os
import subprocess
import sys

import pytest

from hvtrain.system import resources

EVERYTHING = sorted(os.sched_getaffinity(1))
# What each of some calls of `pin_to_cores` returned, where the threads run by then, and how many cores a rank has.
PIN = """
import json, os, sys, threading
from hvtrain.system import resources

threading.Thread(target=threading.Event().wait, daemon=True).start()
found = []
for rank, size in json.loads(sys.argv[1]):
    mine = resources.pin_to_cores(rank, size)
    places = {frozenset(os.sched_getaffinity(int(thread))) for thread in os.listdir("/proc/self/task")}
    found.append((mine and sorted(mine), [sorted(place) for place in places], resources.cores_of_each(size)))
print(json.dumps(found))
"""
needs_even_cores = pytest.mark.skipif(
    len(EVERYTHING) % 2 == 1, reason="this machine's cores cannot be halved"
)


def pinned(*calls, before=()):
    line = [*before, sys.executable, "-c", PIN, json.dumps(calls)]
    return json.loads(subprocess.run(line, capture_output=True, text=True, check=True).stdout)


@pytest.mark.parametrize("number", [1, 2, 3, 6, 12])
def test_shares_are_disjoint_equal_and_complete(number):
    shares = [resources.share_of_cores(range(12), rank, number) for rank in range(number)]
    assert sorted(cpu for share in shares for cpu in share) == list(range(12))
    assert {len(share) for share in shares} == {12 // number}


@pytest.mark.parametrize("number", [5, 13])
def test_what_does_not_come_out_even_is_not_shared(number):
    assert {
        resources.share_of_cores(range(12), rank, number) is None for rank in range(number)
    } == {True}


def test_a_core_and_a_socket_stay_whole(tmp_path, monkeypatch):
    """Two sockets of two cores of two threads, numbered as Linux does: 0 and 4 are one core."""
    for cpu in range(8):
        folder = tmp_path / f"cpu{cpu}" / "topology"
        folder.mkdir(parents=True)
        (folder / "physical_package_id").write_text(f"{cpu % 2}\n")
        (folder / "core_id").write_text(f"{cpu % 4 // 2}\n")
    monkeypatch.setattr(resources, "_CPUS", tmp_path)
    assert resources.sorted_by_core(range(8)) == [0, 4, 2, 6, 1, 5, 3, 7]
    monkeypatch.setattr(resources, "_CPUS", tmp_path / "nothing")
    assert resources.sorted_by_core({5, 1}) == [1, 5]


@needs_even_cores
def test_all_threads_of_a_rank_stay_on_its_share():
    half = len(EVERYTHING) // 2
    first, second = (pinned((rank, 2))[0] for rank in (0, 1))
    assert sorted(first[0] + second[0]) == EVERYTHING
    assert [first, second] == [[share, [share], half] for share in (first[0], second[0])]


@needs_even_cores
def test_ranks_that_come_and_go_change_the_shares():
    """As in an elastic job: two ranks on the host, then one, two, and more than there are cores."""
    many = 2 * len(EVERYTHING) + 1
    two, item, again, too_many = pinned((1, 2), (0, 1), (0, 2), (0, many))
    assert len(two[0]) == len(EVERYTHING) // 2 and item == [
        EVERYTHING,
        [EVERYTHING],
        len(EVERYTHING),
    ]
    assert sorted(two[0] + again[0]) == EVERYTHING
    assert too_many == [None, [EVERYTHING], 1]


@needs_even_cores
def test_what_the_launcher_has_chosen_stays():
    last = EVERYTHING[-1]
    assert pinned((0, 2), before=["taskset", "-c", str(last)]) == [[None, [[last]], 1]]
