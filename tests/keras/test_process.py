"""What is settled before Horovod starts, without ranks."""

import os
import sys

import pytest

from hvtrain.errors import RankError
from hvtrain.keras import process
from hvtrain.system import host_facts


@pytest.mark.parametrize(("chosen", "expected"), [(None, "ens5"), ("eth0", "ens5"), ("ib0", "ib0")])
def test_the_interface_of_nccl_is_that_of_the_launch_unless_the_user_chose_one(
    monkeypatch, chosen, expected
):
    """horovodrun names eth0 for all hosts; on this one that network is on ens5."""
    environment = {"HOROVOD_GLOO_RENDEZVOUS_ADDR": "10.0.0.1", "HOROVOD_GLOO_IFACE": "eth0"}
    monkeypatch.setattr(
        os, "environ", {**environment, **({"NCCL_SOCKET_IFNAME": chosen} if chosen else {})}
    )
    monkeypatch.setattr(host_facts, "address_towards", lambda launcher: "10.0.0.2")
    monkeypatch.setattr(host_facts, "interface_of", {"10.0.0.2": "ens5"}.get)
    process._choose_interface()
    assert (os.environ["HOROVOD_GLOO_IFACE"], os.environ["NCCL_SOCKET_IFNAME"]) == (
        "ens5",
        expected,
    )


def test_a_rank_is_alone_only_if_the_script_says_so(monkeypatch):
    environment = {"OMPI_COMM_WORLD_SIZE": "3", "HOROVOD_CONTROLLER": "gloo"}
    monkeypatch.setattr(os, "environ", environment)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.setattr(process.hvd, "init", lambda *args, **kwargs: None)
    monkeypatch.setattr(process.hvd, "shutdown", lambda: None)
    monkeypatch.setattr(process.hvd, "size", lambda: 1)
    process.init(comm=[2])
    process.init([2])
    with pytest.raises(RankError, match="started 3 ranks but this one finds itself alone"):
        process.init(process_sets=[])
