import pytest

from hvtrain.core.topology import Topology


def test_shares_are_disjoint_and_complete():
    for size in (1, 2, 3, 7, 12):
        shares = [list(Topology(rank=rank, size=size).share(10)) for rank in range(size)]
        assert sorted(item for share in shares for item in share) == list(range(10))
        assert max(map(len, shares)) - min(map(len, shares)) <= 1


@pytest.mark.parametrize("place", [{"rank": 2, "size": 2}, {"rank": -1}, {"local_rank": 1, "local_size": 1}])
def test_impossible_places(place):
    with pytest.raises(ValueError, match="outside"):
        Topology(**place)
