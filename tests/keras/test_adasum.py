"""Where Adasum is refused, on pretended ranks and GPUs; its values are in test_drop_in.py."""

import horovod.tensorflow as hvd
import pytest
import tensorflow as tf

from hvtrain.core.topology import Topology
from hvtrain.keras.process import check_adasum_topology
from hvtrain.keras.reduction import Reducer


def refusals(ranks_by_host, on_gpus, by_host=True):
    """Returns each rank's error, "" for none. by_host: the ranks of a host follow each other."""
    places = [
        (host, local, many) for host, many in enumerate(ranks_by_host) for local in range(many)
    ]
    if not by_host:
        places.sort(key=lambda rank: (rank[1], rank[0]))
    messages = []
    for rank, (host, local, many) in enumerate(places):
        try:
            check_adasum_topology(
                Topology(rank, len(places), local, many, f"s{host}"),
                on_gpus,
                len(set(ranks_by_host)) == 1,
            )
            messages.append("")
        except ValueError as error:
            messages.append(str(error))
    return messages


@pytest.mark.parametrize("ranks_by_host", [[1], [4], [1, 1], [4, 4], [2, 2, 2, 2], [1] * 16])
@pytest.mark.parametrize("on_gpus", [False, True])
def test_powers_of_two_alike_on_all_hosts_are_fine(ranks_by_host, on_gpus):
    assert not any(refusals(ranks_by_host, on_gpus))


@pytest.mark.parametrize("ranks_by_host", [[3], [2, 2, 2], [3, 3]])
@pytest.mark.parametrize("on_gpus", [False, True])
def test_other_numbers_of_ranks_are_refused(ranks_by_host, on_gpus):
    """Two hosts with three GPUs each too: Horovod's own check would let them through, and MPI stops them."""
    for rank, message in enumerate(refusals(ranks_by_host, on_gpus)):
        assert message.startswith(
            "Adasum needs 2, 4, 8, ... ranks, and on GPUs the same number on each"
        )
        assert f"this is rank {rank} of {sum(ranks_by_host)}, and local rank" in message


@pytest.mark.parametrize("ranks_by_host", [[3, 1], [1, 2, 1], [6, 2]])
def test_unlike_hosts_are_refused_on_gpus_alone(ranks_by_host):
    """Horovod's own check for it asks whether a function is true, and lets them through."""
    assert not any(refusals(ranks_by_host, on_gpus=False))
    for message in refusals(ranks_by_host, on_gpus=True):
        assert "on GPUs the same number on each host" in message


def test_ranks_dealt_out_over_hosts_are_refused_on_gpus_alone():
    """Rank 0 would exchange with rank 2, of its own host, whose sum it has already."""
    assert not any(refusals([2, 2], on_gpus=False, by_host=False))
    first, second, third, last = refusals([2, 2], on_gpus=True, by_host=False)
    assert (first, last) == ("", "")
    assert "this is rank 1 of 4, and local rank 0 of 2 on s1; " in second
    assert "this is rank 2 of 4, and local rank 1 of 2 on s0; " in third


@pytest.mark.parametrize(
    ("device", "is_refused"), [("", True), ("/gpu:0", True), ("/CPU:0", False)]
)
def test_an_optimizers_reduction_asks(monkeypatch, device, is_refused):
    for name, value in {
        "rank": 1,
        "size": 4,
        "local_rank": 1,
        "local_size": 3,
        "is_homogeneous": False,
    }.items():
        monkeypatch.setattr(hvd, name, lambda value=value: value)
    for name in ("nccl_built", "mpi_enabled"):
        monkeypatch.setattr(hvd, name, lambda: True)
    monkeypatch.setattr(tf.config, "get_visible_devices", lambda kind: ["a GPU"])
    if not is_refused:
        assert Reducer(op=hvd.Adasum, device_dense=device).op == hvd.Adasum
        return
    with pytest.raises(
        ValueError, match=r"on GPUs the same number on each host.* of 3 on "
    ) as error:
        Reducer(op=hvd.Adasum, device_dense=device)
    assert "\n" not in str(error.value)
