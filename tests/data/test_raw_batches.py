"""Images that cross to the device as they are stored, and are normalized there: the same training but for rounding."""

from types import SimpleNamespace

import keras
import numpy as np
import pytest
import tensorflow as tf

from hvtrain.core.topology import Topology
from hvtrain.data import StreamRequest
from hvtrain.data.sources.built_in import digits
from hvtrain.errors import ConfigError
from hvtrain.step.step_timing import StepMarks
from hvtrain.strategies.loop import make_steps
from hvtrain.tasks import Classification
from hvtrain.training.prepared_step import _weights_by_class, prepare_step


def trained(raw, jit_compile=False):
    source = digits(shift_pixels=1, standardize="per_channel")
    source.raw_batches = raw
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [keras.Input(source.image_shape), keras.layers.Flatten(), keras.layers.Dense(10)]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.1), loss, jit_compile=jit_compile)
    model.optimizer.build(model.trainable_variables)
    prepare_step(model, source)
    batches = source.training(
        StreamRequest(Topology(0, 1), 32, seed=3, start_step=0, steps_per_epoch=44)
    )
    make_steps(model, iter(batches), StepMarks())(60)
    return batches.element_spec[0].dtype, model.get_weights()


@pytest.mark.parametrize("jit_compile", [False, True])
def test_the_same_weights_from_a_quarter_of_the_bytes(jit_compile):
    raw, plain = trained(True, jit_compile), trained(False, jit_compile)
    assert (raw[0], plain[0]) == (tf.uint8, tf.float32)
    gaps = [np.abs(ours - theirs).max() for ours, theirs in zip(raw[1], plain[1], strict=True)]
    assert max(gaps) < 1e-5, (
        "TensorFlow may multiply by the reciprocal in one place and divide in the other"
    )
    assert np.abs(plain[1][0]).max() > 0.3, "it has trained"


@pytest.mark.parametrize(
    ("names", "chosen", "expected"),
    [
        (["1", "2"], {1: 5.0}, [5.0, 1.0]),
        (["1", "2"], {0: 1.0, 1: 5.0}, r"names the class 0, and t has the classes 1, 2; choose"),
        (["no", "yes"], {1: 5.0}, [1.0, 5.0]),
        (["false", "true"], {True: 5.0}, [1.0, 5.0]),
        (["no", "yes"], {2: 5.0}, r"the classes 0 ... 1 or no, yes; choose from these"),
        ([], {1: 5.0}, [1.0, 5.0]),
    ],
)
def test_weights_go_to_the_class_that_is_named(names, chosen, expected):
    """A number is an index only where no class is called by a number."""
    facts = {"num_classes": 2, **({"class_names": names} if names else {})}
    source = SimpleNamespace(name="t", facts=lambda: facts)
    if isinstance(expected, list):
        assert _weights_by_class("train.class_weights", chosen, source) == expected
        return
    with pytest.raises(ConfigError, match=expected):
        _weights_by_class("train.class_weights", chosen, source)


def test_class_weights_count_in_the_loss_and_not_in_the_metrics():
    source = digits()
    model = keras.Sequential([keras.Input((2,)), keras.layers.Activation("linear")])
    model.compile(
        keras.optimizers.SGD(0.0),
        Classification().default_loss(),
        weighted_metrics=[keras.metrics.SparseCategoricalAccuracy(name="accuracy")],
    )
    prepare_step(model, source, class_weights=[1.0, 9.0])
    logits, targets, weights = np.array([[1.0, 0.0]] * 4), np.array([0, 0, 0, 1]), np.ones(4)
    logs = model.train_step((tf.constant(logits), tf.constant(targets), tf.constant(weights)))
    assert float(logs["accuracy"]) == 0.75
