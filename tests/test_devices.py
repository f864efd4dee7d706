"""Which GPU a rank takes, from what all ranks see; no GPU is needed for the rule."""

import pytest

from hvtrain.errors import RankError
from hvtrain.keras.devices import View, choose_gpus, visible_names


def host(name, gpus, ranks):
    return [View(name, rank, tuple(gpus)) for rank in range(ranks)]


def test_no_gpu_is_fine():
    assert choose_gpus(host("s1", "", 2)) == [None, None]


def test_one_each_on_every_host():
    assert choose_gpus([*host("s1", "0123", 4), *host("s2", "0123", 4)]) == [0, 1, 2, 3, 0, 1, 2, 3]


def test_visible_devices_set_for_the_host():
    assert choose_gpus(host("s1", "57", 2)) == [0, 1]


def test_visible_devices_set_for_each_rank():
    assert choose_gpus([View("s1", 0, ("3",)), View("s1", 1, ("6",))]) == [0, 0]


def test_two_ranks_on_one_gpu_are_refused_unless_asked_for():
    with pytest.raises(RankError, match=r"host s1 has 1 visible GPU\(s\) for 2 ranks; start fewer ranks"):
        choose_gpus(host("s1", "0", 2))
    assert choose_gpus(host("s1", "01", 4), share=True) == [0, 1, 0, 1]


def test_the_same_first_gpu_in_different_lists_is_refused():
    with pytest.raises(RankError, match="2 ranks on host s1 would use GPU 0"):
        choose_gpus([View("s1", 0, ("0", "1")), View("s1", 1, ("0",))])


def test_the_same_number_on_two_hosts_is_two_gpus():
    assert choose_gpus([View("s1", 0, ("0",)), View("s2", 0, ("0",))]) == [0, 0]


def test_names_of_the_visible():
    assert visible_names("GPU-a,GPU-b", 2) == ("GPU-a", "GPU-b")
    assert visible_names("", 0) == visible_names(None, 0) == ()
    assert visible_names("0,1,2", 2) == ("0", "1")
