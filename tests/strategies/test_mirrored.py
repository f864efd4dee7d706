"""strategy=mirrored: settings that are refused before it starts. Its runs: test_tf_distribute.py."""

from types import SimpleNamespace

import pytest
import tensorflow as tf

from hvtrain.errors import ConfigError, RankError
from hvtrain.strategies.base import Strategy
from hvtrain.strategies.mirrored import MirroredStrategy, make_mirrored_strategy
from hvtrain.strategies.replica_step import ReplicaReducer


def test_settings_are_refused_before_it_starts(monkeypatch):
    with pytest.raises(
        ConfigError, match=r"strategy.num_replicas=0 is not a whole number of at least 1"
    ):
        MirroredStrategy(0)
    with pytest.raises(
        ConfigError, match=r"strategy=mirrored and comm.tune=true exclude each other; leave one"
    ):
        MirroredStrategy().expect_restart()
    tf.zeros(1)
    with pytest.raises(
        RankError,
        match=r"strategy=mirrored must start before TensorFlow has initialized its devices",
    ):
        make_mirrored_strategy.__wrapped__(2)
    gpu = tf.config.PhysicalDevice("/physical_device:GPU:0", "GPU")
    monkeypatch.setattr(tf.config, "list_physical_devices", lambda kind: [gpu])
    with pytest.raises(
        ConfigError, match=r"strategy.num_replicas=3 exceeds the 1 visible GPU\(s\); lower it"
    ):
        make_mirrored_strategy.__wrapped__(3)
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    with pytest.raises(
        ConfigError, match=r"strategy=mirrored is one process, but the launcher started 2; start it"
    ):
        MirroredStrategy(2).start()
    with pytest.raises(
        ConfigError,
        match=r"strategy=single is one process, .* 2; start it with python -m hvtrain, or",
    ):
        Strategy().start_watchdog(0)


def test_what_float8_layers_exchange_is_refused():
    class Scale:
        overwrite_with_gradient = True

    reducer = ReplicaReducer(strategy=SimpleNamespace(name="mirrored", num_computing=2))
    with pytest.raises(
        ConfigError,
        match=r"strategy=mirrored sums gradients, but float8 layers need maxima; choose",
    ):
        reducer([tf.ones(1)], [Scale()])
