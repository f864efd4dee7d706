"""Parameter servers in one process: which GPU each process gets (none is needed), and what a worker computes."""

import keras
import pytest
import tensorflow as tf

from hvtrain.errors import RankError
from hvtrain.strategies import ps_cluster
from hvtrain.strategies.ps_cluster import choose_devices, roles_of
from hvtrain.strategies.worker_step import compute


@pytest.fixture
def places(monkeypatch):
    """The hosts and GPUs that the roles get; hosts: of each rank, and the GPUs that it sees."""

    def chosen(roles, *hosts, share=False):
        seen = [(name, tuple(gpus), ()) for name, gpus in hosts]
        monkeypatch.setattr(ps_cluster, "exchange", lambda value, name: seen)
        monkeypatch.setattr(ps_cluster, "gpu_uuids", lambda visible: ())
        return choose_devices(roles, share)

    return chosen


def test_workers_have_a_gpu_each_and_servers_none(places):
    """Two workers on each of two hosts; the coordinator and the servers, which come first, take none of them."""
    roles = roles_of(7, 2, "parameter_server")
    hosts, gpus = places(roles, *[("s1", "01")] * 5, *[("s2", "01")] * 2)
    assert hosts == ["s1"] * 5 + ["s2"] * 2
    assert gpus == [None, None, None, 0, 1, 0, 1]


def test_hosts_of_servers_need_no_gpu(places):
    assert places(roles_of(4, 1, "parameter_server"), *[("s1", "")] * 2, *[("s2", "01")] * 2)[
        1
    ] == [None, None, 0, 1]


def test_more_workers_than_gpus(places):
    roles, host = roles_of(4, 1, "parameter_server"), ("s1", "0")
    with pytest.raises(RankError, match=r"host s1 has 1 visible GPU\(s\) for 2 ranks"):
        places(roles, *[host] * 4)
    assert places(roles, *[host] * 4, share=True)[1] == [None, None, 0, 0]


class UnusedWeight(keras.layers.Dense):
    def build(self, input_shape):
        super().build(input_shape)
        self.unused = self.add_weight(shape=(2,), name="unused")


def test_a_worker_checks_the_gradients_of_a_model_with_a_weight_that_has_none():
    model = keras.Sequential([keras.Input((3,)), UnusedWeight(1, name="own")])
    model.compile(keras.optimizers.SGD(), "mse")
    model.optimizer.build(model.trainable_variables)
    batch = (tf.ones([4, 3]), tf.zeros([4, 1]))

    @tf.function
    def gradients():
        computed = compute(model, batch, tf.constant(1, tf.int64), check_finite=True)
        return {variable.path: gradient for variable, gradient in computed.gradients}

    assert sorted(path.rpartition("/")[2] for path in gradients()) == ["bias", "kernel"]
