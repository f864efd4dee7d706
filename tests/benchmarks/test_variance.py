"""The separable network: its signal dies under Keras's depthwise fan-in and lives under unit_gain."""

from __future__ import annotations

import keras
import numpy as np
import pytest

from benchmarks import variance
from hvtrain import models
from hvtrain.errors import ConfigError


def signals(**options) -> dict[str, variance.LayerSignal]:
    keras.utils.set_random_seed(0)
    numbers = np.random.default_rng(0)
    images = numbers.standard_normal((16, 28, 28, 1), dtype=np.float32)
    model = models.separable_cnn((28, 28, 1), 10, **options)
    return {s.layer: s for s in variance.signals(model, images, numbers.integers(0, 10, 16))}


def test_unit_gain_carries_the_signal_to_the_end():
    layers = signals()
    assert all(0.1 < signal.variance < 10 for signal in layers.values())
    assert layers["conv"].gradient_rms > 1e-3


@pytest.mark.parametrize("initializer", ["glorot_uniform", "lecun_normal"])
def test_fans_that_count_channels_kill_it(initializer):
    layers = signals(initializer=initializer, depthwise_initializer=initializer)
    assert layers["separable3_2"].variance < 1e-9
    assert layers["conv"].gradient_rms < 1e-4


def test_each_depthwise_layer_weakens_the_signal_by_its_channels():
    layers = signals(depthwise_initializer="lecun_normal")
    for before, after, channels in (
        ("conv", "separable1_1", 128),
        ("separable2_1", "separable2_2", 256),
    ):
        loss = layers[before].variance / layers[after].variance
        assert channels / 4 < loss < channels, "selu gives back about a factor of two"


def test_a_layer_without_weights_has_no_gradient():
    assert signals()["pool1"].gradient_rms is None


def run_command(monkeypatch, *settings):
    monkeypatch.setattr("sys.argv", ["variance", "model=mlp", "train.batch_size=16", *settings])
    variance.main()


@pytest.mark.parametrize(
    "settings", [["dataset=synthetic", "dataset.image_shape=[4,4,1]"], ["dataset=digits"]]
)
def test_the_command_prints_a_table_of_noise_or_real_images(settings, monkeypatch, capsys):
    run_command(monkeypatch, "model.hidden=[8]", *settings)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == [
        "layer",
        "(image)",
        "flatten",
        "dense1",
        "logits",
    ]


@pytest.mark.parametrize(
    ("setting", "complaint"), [("model.hiden=[8]", "hiden"), ("model.dropout=2", "between 0 and 1")]
)
def test_the_command_refuses_what_the_network_does_not_take(setting, complaint, monkeypatch):
    with pytest.raises(ConfigError, match=complaint):
        run_command(monkeypatch, setting)
