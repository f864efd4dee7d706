import pytest

from hvtrain.core.topology import Topology


def test_shares_are_disjoint_and_complete():
    for size in (1, 2, 3, 7, 12):
        shares = [list(Topology(rank=rank, size=size).share(10)) for rank in range(size)]
        assert sorted(item for share in shares for item in share) == list(range(10))
        assert max(map(len, shares)) - min(map(len, shares)) <= 1


@pytest.mark.parametrize("weights", [(), (3, 1, 2), (6, 2, 2)])
def test_shares_of_unlike_size_are_disjoint_and_complete_and_their_size_is_known(weights):
    for number in range(25):
        places = [Topology(rank, 3, weights=weights) for rank in range(3)]
        shares = [list(topology.share(number)) for topology in places]
        assert sorted(index for share in shares for index in share) == list(range(number))
        assert all(share == sorted(share) for share in shares)
        assert [len(share) for share in shares] == [
            topology.share_size(number) for topology in places
        ]


@pytest.mark.parametrize(
    "topology", [{"rank": 2, "size": 2}, {"rank": -1}, {"local_rank": 1, "local_size": 1}]
)
def test_impossible_places(topology):
    with pytest.raises(ValueError, match="outside"):
        Topology(**topology)
