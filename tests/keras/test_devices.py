"""Which GPU a rank takes, from what all ranks see, and what TensorFlow is told. No GPU is needed."""

import os
import socket

import pytest
import tensorflow as tf

from hvtrain.errors import RankError
from hvtrain.keras import devices
from hvtrain.keras.devices import View, choose_gpus, pin_gpu, visible_names
from hvtrain.strategies.base import Strategy
from launching import WORKERS, run


def host(name, gpus, ranks):
    return [View(name, rank, tuple(gpus)) for rank in range(ranks)]


def test_no_gpu_is_fine():
    assert choose_gpus(host("s1", "", 2)) == [None, None]


def test_one_each_on_every_host():
    assert choose_gpus([*host("s1", "0123", 4), *host("s2", "0123", 4)]) == [0, 1, 2, 3, 0, 1, 2, 3]


def test_hosts_may_be_unlike():
    assert choose_gpus([*host("s1", "01", 2), *host("s3", "0", 1)]) == [0, 1, 0]


def test_a_host_whose_driver_is_broken_is_named():
    """Or the first collective ends in Horovod's "Mismatched CPU/GPU device selection"."""
    with pytest.raises(
        RankError,
        match=r"ranks on s2 see no GPU, but those on s1, s3 do; check s2 with nvidia-smi",
    ):
        choose_gpus([*host("s1", "01", 2), *host("s2", "", 2), *host("s3", "0", 1)])


def test_one_gpu_for_each_task_by_cgroups():
    """Slurm's --gpus-per-task=1: each rank sees one GPU, which it numbers 0, and they are two."""
    assert choose_gpus([View("s1", 0, ("0",), ("GPU-a",)), View("s1", 1, ("0",), ("GPU-b",))]) == [
        0,
        0,
    ]
    with pytest.raises(RankError, match=r"host s1 has 1 visible GPU\(s\) for 2 ranks"):
        choose_gpus([View("s1", 0, ("0",), ("GPU-a",)), View("s1", 1, ("0",), ("GPU-a",))])


def test_two_lists_that_begin_with_the_same_gpu_under_two_numbers():
    views = [View("s1", 0, ("1", "0"), ("GPU-b", "GPU-a")), View("s1", 1, ("0",), ("GPU-b",))]
    with pytest.raises(RankError, match="2 ranks on host s1 would use GPU 0"):
        choose_gpus(views)


def test_visible_devices_set_for_the_host():
    assert choose_gpus(host("s1", "57", 2)) == [0, 1]


def test_visible_devices_set_for_each_rank():
    assert choose_gpus([View("s1", 0, ("3",)), View("s1", 1, ("6",))]) == [0, 0]
    assert choose_gpus([View("s1", 0, ("3", "1")), View("s1", 1, ("1", "3"))]) == [0, 0], (
        "each the first of its own"
    )


def test_two_ranks_on_one_gpu_are_refused_unless_asked_for():
    with pytest.raises(
        RankError, match=r"host s1 has 1 visible GPU\(s\) for 2 ranks; start fewer ranks"
    ):
        choose_gpus(host("s1", "0", 2))
    assert choose_gpus(host("s1", "01", 4), share=True) == [0, 1, 0, 1]


def test_more_ranks_than_gpus_on_the_second_host_alone_are_refused():
    with pytest.raises(RankError, match=r"host s2 has 2 visible GPU\(s\) for 3 ranks"):
        choose_gpus([*host("s1", "0123", 4), *host("s2", "01", 3)])


def test_the_same_first_gpu_in_different_lists_is_refused():
    views = [View("s1", 0, ("0", "1")), View("s1", 1, ("0",))]
    with pytest.raises(RankError, match="2 ranks on host s1 would use GPU 0"):
        choose_gpus(views)
    assert choose_gpus(views, share=True) == [0, 0]


def test_the_same_number_on_two_hosts_is_two_gpus():
    assert choose_gpus([View("s1", 0, ("0",)), View("s2", 0, ("0",))]) == [0, 0]


@pytest.mark.parametrize(
    "variable, count, names",
    [
        (None, 0, ()),
        (None, 2, ("0", "1")),
        ("3,1", 2, ("3", "1")),
        (" 3, 1 ", 2, ("3", "1")),
        ("GPU-a1b2,GPU-c3d4", 2, ("GPU-a1b2", "GPU-c3d4")),
        ("MIG-11aa,MIG-22bb", 1, ("MIG-11aa",)),
        ("0,1,2", 2, ("0", "1")),
        ("0,-1,1", 1, ("0",)),
        ("", 0, ()),
        ("-1", 0, ()),
        ("NoDevFiles", 0, ()),
        ("2", 2, ("0", "1")),
    ],
)
def test_names_of_the_visible(variable, count, names):
    """CUDA stops at the first entry that is no GPU; TensorFlow's count says how far it came."""
    assert visible_names(variable, count) == names


class FakeTensorFlow:
    """Replaces what pin_gpu calls in TensorFlow and Horovod, on one rank of a job, and records its calls."""

    def __init__(self, monkeypatch, count, rank, views):
        self.gpus = [
            tf.config.PhysicalDevice(f"/physical_device:GPU:{index}", "GPU")
            for index in range(count)
        ]
        self.calls = []
        self.refusal = None
        monkeypatch.setattr(
            tf.config, "list_physical_devices", lambda kind: self.gpus if kind == "GPU" else []
        )
        monkeypatch.setattr(
            tf.config, "set_visible_devices", lambda gpu, kind: self.record("only", gpu, kind)
        )
        monkeypatch.setattr(
            tf.config.experimental,
            "set_memory_growth",
            lambda gpu, on: self.record("growth", gpu, on),
        )
        monkeypatch.setattr(devices.hvd, "rank", lambda: rank)
        monkeypatch.setattr(devices.hvd, "local_rank", lambda: views[rank].local_rank)
        monkeypatch.setattr(devices.hvd, "size", lambda: len(views))
        monkeypatch.setattr(devices, "exchange", self.exchange)
        monkeypatch.setattr(devices, "gpu_uuids", lambda number: views[rank].ids[:number])
        self.rank, self.views = rank, views

    def record(self, *call):
        if self.refusal:
            raise RuntimeError(self.refusal)
        self.calls.append(call)

    def exchange(self, view, name):
        assert view == self.views[self.rank], "what this rank says of itself"
        return self.views


def pinned_to(fake, index):
    return [("only", fake.gpus[index], "GPU"), ("growth", fake.gpus[index], True)]


def test_a_rank_is_told_its_gpu_by_local_rank(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    views = [*host("s1", "01", 2), *host("s2", "01", 2)]
    fake = FakeTensorFlow(monkeypatch, count=2, rank=3, views=views)
    assert pin_gpu("s2") == ["s1 GPU 0", "s1 GPU 1", "s2 GPU 0", "s2 GPU 1"]
    assert fake.calls == pinned_to(fake, 1), "visible first, and memory growth on the same device"


def test_the_order_of_cuda_visible_devices_holds(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,1")
    fake = FakeTensorFlow(monkeypatch, count=2, rank=0, views=host("s1", "31", 2))
    assert pin_gpu("s1") == ["s1 GPU 3", "s1 GPU 1"]
    assert fake.calls == pinned_to(fake, 0), "TensorFlow numbers what it sees from 0"


def test_a_list_of_its_own_for_each_rank(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-c3d4")
    views = [View("s1", 0, ("GPU-a1b2",)), View("s1", 1, ("GPU-c3d4",))]
    fake = FakeTensorFlow(monkeypatch, count=1, rank=1, views=views)
    assert pin_gpu("s1") == ["s1 GPU GPU-a1b2", "s1 GPU GPU-c3d4"]
    assert fake.calls == pinned_to(fake, 0)


def test_a_rank_that_joins_asks_no_other(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    fake = FakeTensorFlow(monkeypatch, count=2, rank=1, views=host("s1", "01", 4))
    monkeypatch.setattr(
        devices, "exchange", lambda view, name: pytest.fail("the others are training")
    )
    assert pin_gpu("s1", by_local_rank=True) == ["s1 GPU 1"]
    assert fake.calls == pinned_to(fake, 1)
    monkeypatch.setattr(devices.hvd, "local_rank", lambda: 3)
    with pytest.raises(
        RankError, match=r"host s1 has 2 visible GPU\(s\) for 4 ranks; start fewer ranks"
    ):
        pin_gpu("s1", by_local_rank=True)


def test_a_single_process_takes_one_gpu_too(monkeypatch):
    fake = FakeTensorFlow(monkeypatch, count=2, rank=0, views=host("s1", "01", 1))
    Strategy().start()
    assert fake.calls == pinned_to(fake, 0)


def test_gpus_of_one_number_are_told_apart(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    views = [View("s1", 0, ("0",), ("GPU-a1b2",)), View("s1", 1, ("0",), ("GPU-c3d4",))]
    fake = FakeTensorFlow(monkeypatch, count=1, rank=1, views=views)
    assert pin_gpu("s1") == ["s1 GPU GPU-a1b2", "s1 GPU GPU-c3d4"]
    assert fake.calls == pinned_to(fake, 0)


def test_ranks_that_share_are_told_the_same_gpu(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    fake = FakeTensorFlow(monkeypatch, count=1, rank=1, views=host("s1", "0", 2))
    with pytest.raises(RankError, match="visible GPU"):
        pin_gpu("s1")
    assert fake.calls == [], "refused before TensorFlow is told anything"
    assert pin_gpu("s1", share=True) == ["s1 GPU 0", "s1 GPU 0"]
    assert fake.calls == pinned_to(fake, 0)
    assert os.environ["NCCL_MULTI_RANK_GPU_ENABLE"] == "1", "or NCCL refuses them"


def test_leave_to_share_is_not_used_where_there_is_no_need(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    fake = FakeTensorFlow(monkeypatch, count=2, rank=1, views=host("s1", "01", 2))
    assert pin_gpu("s1", share=True) == ["s1 GPU 0", "s1 GPU 1"]
    assert fake.calls == pinned_to(fake, 1)
    assert "NCCL_MULTI_RANK_GPU_ENABLE" not in os.environ


@pytest.mark.parametrize("variable", ["", "-1", "NoDevFiles"])
def test_hidden_gpus_leave_the_cpu(monkeypatch, variable):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", variable)
    fake = FakeTensorFlow(monkeypatch, count=0, rank=0, views=host("s1", "", 2))
    assert pin_gpu("s1", pin_cores=False) == ["s1 CPU", "s1 CPU"]
    assert fake.calls == []


def test_a_device_touched_before_is_one_clear_error(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    fake = FakeTensorFlow(monkeypatch, count=1, rank=0, views=host("s1", "0", 1))
    fake.refusal = "Visible devices cannot be modified after being initialized"
    with pytest.raises(
        RankError, match=r"after being initialized\); call pin_gpu right after init, before"
    ) as caught:
        pin_gpu("s1")
    assert "\n" not in str(caught.value)


@pytest.mark.distributed
def test_real_ranks_ask_each_other_before_tensorflow_starts_a_device(tmp_path):
    """The fakes refuse, as TensorFlow does, once its devices run: what ranks tell each other must not start them."""
    code, output = run(
        "gloo", 2, "python", str(WORKERS / "fake_gpus.py"), cwd=tmp_path, FAKE_GPUS="2"
    )
    assert code == 0, output
    here = socket.gethostname()
    for rank in range(2):
        assert f"rank {rank} host {here} local {rank} device GPU {rank}\n" in output


@pytest.mark.nightly
@pytest.mark.distributed
def test_real_ranks_with_a_list_each(tmp_path):
    own = 'CUDA_VISIBLE_DEVICES="$((5 + OMPI_COMM_WORLD_LOCAL_RANK)),3" exec python "$1"'
    code, output = run(
        "mpirun", 2, "bash", "-c", own, "bash", str(WORKERS / "fake_gpus.py"), cwd=tmp_path
    )
    assert code == 0, output
    for rank in range(2):
        assert f"local {rank} device GPU {5 + rank}\n" in output


@pytest.mark.distributed
def test_a_tensor_made_first_is_named(tmp_path):
    code, output = run(
        None, 1, "python", str(WORKERS / "fake_gpus.py"), "touch", cwd=tmp_path, FAKE_GPUS="1"
    )
    assert code == 1
    assert "rank 0 cannot pin a GPU: TensorFlow has initialized all of them already" in output
