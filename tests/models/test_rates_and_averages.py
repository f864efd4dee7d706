"""train.rates, train.weight_decay and train.ema: what Keras's optimizers do with them, against arithmetic by hand."""

from types import SimpleNamespace

import keras
import numpy as np
import pytest
from keras import layers
from keras.optimizers import LossScaleOptimizer

import hvtrain.keras as hvd
from hvtrain.config.compose import compose
from hvtrain.config.schema import from_dict
from hvtrain.errors import ConfigError
from hvtrain.models.rates import (
    averaged_weights,
    decay_kernels,
    factors_of,
    keep_averages,
    multiply_rates,
)
from hvtrain.training.setup import build_optimizer

rng = np.random.default_rng(0)
BATCHES = [
    (rng.normal(size=(8, 3)).astype("float32"), rng.normal(size=(8, 2)).astype("float32"))
    for _ in range(6)
]


@pytest.fixture(scope="module", autouse=True)
def horovod():
    hvd.init()


def compiled(optimizer, distributed=False):
    keras.utils.set_random_seed(1)
    model = keras.Sequential(
        [keras.Input((3,)), layers.Dense(4, name="body"), layers.Dense(2, name="head")]
    )
    model.compile(
        hvd.DistributedOptimizer(optimizer) if distributed else optimizer, "mse", jit_compile=False
    )
    model.optimizer.build(model.trainable_variables)
    return model


def set_rates(model, rates):
    multiply_rates(model.optimizer, model.trainable_variables, factors_of(model, rates))


def changes(optimizer, rates=None, distributed=False):
    """Of each variable, after one step."""
    model = compiled(optimizer, distributed)
    set_rates(model, rates)
    before = model.get_weights()
    model.train_on_batch(*BATCHES[0])
    return [new - old for old, new in zip(before, model.get_weights())]


OPTIMIZERS = {
    "adam": lambda: keras.optimizers.Adam(0.01),
    "adamw": lambda: keras.optimizers.AdamW(0.01, weight_decay=0.5),
    "momentum": lambda: keras.optimizers.SGD(0.01, 0.9, nesterov=True),
    "lion": lambda: keras.optimizers.Lion(0.01, weight_decay=0.1),
    "lamb": lambda: keras.optimizers.Lamb(0.01),
    # Muon leaves the biases and, here, the head to Adam, with a weight decay of its own.
    "muon": lambda: keras.optimizers.Muon(
        0.01, exclude_layers=["head"], weight_decay=0.5, adam_weight_decay=0.3
    ),
    "clipped": lambda: keras.optimizers.SGD(1.0, global_clipnorm=0.1),
    "half": lambda: LossScaleOptimizer(keras.optimizers.Adam(0.01)),
}


@pytest.mark.parametrize("distributed", [False, True])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_rate_is_multiplied_for_the_parts_that_a_pattern_names(name, distributed):
    plain = changes(OPTIMIZERS[name](), None, distributed)
    scaled = changes(OPTIMIZERS[name](), {"*": 3.0, "body": 0.1, "head/bias": 2}, distributed)
    for change, other, factor in zip(plain, scaled, [0.1, 0.1, 3.0, 2.0]):
        np.testing.assert_allclose(other, factor * change, rtol=1e-4, atol=1e-7)
        assert np.abs(change).max() > 1e-4


def test_a_factor_on_the_gradient_would_be_lost():
    model = compiled(keras.optimizers.Adam(0.01))
    before = model.get_weights()
    model.optimizer.apply([0.1 * np.ones(v.shape, "float32") for v in model.trainable_variables])
    assert np.allclose(
        [np.abs(new - old).max() for old, new in zip(before, model.get_weights())], 0.01, rtol=1e-3
    )


def test_other_factors_of_one_leave_every_bit():
    for first, other in zip(
        changes(keras.optimizers.AdamW(0.01)), changes(keras.optimizers.AdamW(0.01), {"*": 1})
    ):
        np.testing.assert_array_equal(first, other)


def test_rates_of_nothing_and_optimizers_that_step_otherwise_are_refused():
    class Own(keras.optimizers.SGD):
        def apply(self, grads, trainable_variables=None):
            return super().apply(grads, trainable_variables)

    with pytest.raises(
        ConfigError,
        match=r"^train.rates names boddy, which matches nothing trainable; names in this model include",
    ):
        set_rates(compiled(keras.optimizers.SGD()), {"boddy": 2})
    with pytest.raises(
        ConfigError,
        match=r"^train.rates and Own, which overrides apply, exclude each other; choose",
    ):
        set_rates(compiled(Own(), distributed=True), {"body": 2})
    with pytest.raises(
        ConfigError,
        match=r"^train.ema=0.9 and Own, which overrides apply, exclude each other; choose",
    ):
        keep_averages(Own(), 0.9)
    with pytest.raises(
        ConfigError,
        match=r"^train.weight_decay=0.1 and Own, which overrides apply, exclude each other",
    ):
        decay_kernels(Own(), 0.1)
    with pytest.raises(
        ConfigError, match=r"^train.ema=0.9 and optimizer.use_ema exclude each other; leave"
    ):
        keep_averages(keras.optimizers.SGD(use_ema=True), 0.9)


@pytest.mark.parametrize("distributed", [False, True])
@pytest.mark.parametrize("name", ["momentum", "adam", "half"])
def test_kernels_decay_as_under_an_l2_regularizer_and_biases_do_not(name, distributed):
    def trained(optimizer, regularizer=None):
        model = compiled(optimizer, distributed)
        for variable in model.trainable_variables:
            variable.regularizer = regularizer if variable.name == "kernel" else None
        for batch in BATCHES:
            model.train_on_batch(*batch)
        return model.get_weights()

    decayed = OPTIMIZERS[name]()
    decay_kernels(decayed, 0.1)
    # Keras's L2 adds its factor times the squares, whose gradient is twice the weights.
    expected = trained(OPTIMIZERS[name](), keras.regularizers.L2(0.05))
    for weight, other in zip(trained(decayed), expected):
        np.testing.assert_allclose(weight, other, rtol=1e-5, atol=1e-6)
    kernel, plain = expected[0], trained(OPTIMIZERS[name]())[0]
    assert np.abs(kernel - plain).max() > 1e-3


def test_all_rows_of_an_embedding_decay():
    optimizer = keras.optimizers.SGD(0.5)
    decay_kernels(optimizer, 0.1)
    model = keras.Sequential(
        [keras.Input((1,), dtype="int32"), layers.Embedding(4, 2), layers.Flatten()]
    )
    model.compile(optimizer, lambda _, y: 0.0 * y, jit_compile=False)
    before = model.get_weights()[0]
    model.train_on_batch(np.array([[1]]), np.zeros([1, 2]))
    np.testing.assert_allclose(model.get_weights()[0], 0.95 * before, rtol=1e-6)


@pytest.mark.parametrize("accumulate", [1, 2, 3])
@pytest.mark.parametrize("kind", ["plain", "scaled", "distributed"])
def test_the_average_is_of_the_weights_after_each_step_that_changes_them(accumulate, kind):
    steps = {} if accumulate == 1 else {"gradient_accumulation_steps": accumulate}
    optimizer = keras.optimizers.SGD(0.1, **steps)
    optimizer = LossScaleOptimizer(optimizer) if kind == "scaled" else optimizer
    keep_averages(optimizer, 0.7)
    model = compiled(optimizer, kind == "distributed")
    average = None
    for number, batch in enumerate(BATCHES, 1):
        model.train_on_batch(*batch)
        if number % accumulate == 0:
            now = model.get_weights()
            average = now if average is None else [0.7 * a + 0.3 * b for a, b in zip(average, now)]
    raw = model.get_weights()
    with averaged_weights(model, 0.7):
        for weight, expected in zip(model.get_weights(), average):
            np.testing.assert_allclose(weight, expected, rtol=1e-5, atol=1e-6)
        assert max(np.abs(a - b).max() for a, b in zip(model.get_weights(), raw)) > 1e-3
    for weight, expected in zip(model.get_weights(), raw):
        np.testing.assert_array_equal(weight, expected)
    model.optimizer.finalize_variable_values(model.trainable_variables)
    for weight, expected in zip(model.get_weights(), average):
        np.testing.assert_allclose(weight, expected, rtol=1e-5, atol=1e-6)


def test_the_raw_weights_come_back_after_an_error_too():
    optimizer = keras.optimizers.SGD(0.1)
    keep_averages(optimizer, 0.5)
    model = compiled(optimizer)
    first = model.get_weights()
    with averaged_weights(model, 0.5):
        assert all(np.array_equal(a, b) for a, b in zip(first, model.get_weights())), (
            "no average before the first step"
        )
    model.optimizer.finalize_variable_values(model.trainable_variables)
    assert all(np.array_equal(a, b) for a, b in zip(first, model.get_weights())), "nor at the end"
    for batch in BATCHES[:2]:
        model.train_on_batch(*batch)
    raw = model.get_weights()
    with pytest.raises(RuntimeError), averaged_weights(model, 0.5):
        raise RuntimeError
    assert all(np.array_equal(a, b) for a, b in zip(raw, model.get_weights()))


def test_the_runner_gives_its_optimizer_the_average_and_the_decay():
    config = from_dict(compose(["train.ema=0.99", "train.accumulate=2", "train.weight_decay=0.1"]))
    plan = SimpleNamespace(
        base_learning_rate=0.1,
        peak_learning_rate=0.1,
        steps_per_epoch=2,
        scheduled_steps=9,
        num_steps=9,
        shift=0,
    )
    optimizer = build_optimizer(config, plan)
    assert (optimizer.use_ema, optimizer.ema_momentum) == (True, 0.99)
    assert "decay_kernels" in optimizer.update_step.__qualname__
    assert "average_after_steps" in optimizer._update_model_variables_moving_average.__qualname__
