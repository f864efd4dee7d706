"""A small data set and a small model for each task, with unlike amounts of what counts in the examples."""

import keras
import numpy as np
import tensorflow as tf

from hvtrain.data import from_arrays

NUM_TRAIN, NUM_TEST, LENGTH = 61, 23, 6


def data(kind, **_):
    rng, count = np.random.default_rng(5), NUM_TRAIN + NUM_TEST
    x, y, w = rng.normal(size=(count, 5)), None, None
    share = rng.random(count) ** 2  # Of what counts in an example.
    facts = {"num_classes": 3}
    if kind == "classification":
        y = (x[:, 0] > 0.8).astype(int) + (x[:, 1] > 0.5)
    elif kind == "binary":
        y, facts = (x[:, 0] > 0.5).astype(np.int32), {}
    elif kind == "multilabel":
        y = (x[:, :3] > 0.3).astype(np.float32)
    elif kind == "regression":
        y, w, facts = x @ np.arange(5.0), share, {}
    elif kind == "segmentation":
        x = rng.normal(size=(count, 4, 4, 2))
        y = np.where(
            rng.random((count, 4, 4)) < share[:, None, None],
            (x[..., 0] > 0).astype(np.uint8),
            np.uint8(255),
        )
    elif kind == "language":
        x = rng.integers(9, size=(count, LENGTH))
        y, w, facts = (
            (x + 1) % 9,
            (np.arange(LENGTH) < LENGTH * share[:, None]).astype(float),
            {"vocabulary_size": 9},
        )
    elif kind == "words":
        x = rng.integers(9, size=(count, LENGTH))
        y = x[:, 0] % 3
    elif kind == "custom":
        facts = {}
        y = {
            "size": x[:, :1] * 2,
            "kind": np.where(rng.random(count) < share, (x[:, 1] > 0).astype(int), -1),
        }
        x = {"a": x, "b": rng.normal(size=(count, 2))}
    train = keras.tree.map_structure(lambda array: array[:NUM_TRAIN], (x, y))
    test = keras.tree.map_structure(lambda array: array[NUM_TRAIN:], (x, y))
    weights = {} if w is None else {"w_train": w[:NUM_TRAIN], "w_test": w[NUM_TRAIN:]}
    return from_arrays(*train, *test, **weights, name=kind, images=False, facts=facts)


def model(kind, input_spec, num_outputs=None, **_):
    inputs = keras.tree.map_structure(
        lambda spec: keras.Input(tuple(spec.shape), dtype=spec.dtype.name), input_spec
    )
    if kind == "language":
        features = keras.layers.Embedding(9, 8)(inputs)
    elif kind == "words":
        features = keras.layers.Flatten()(keras.layers.Embedding(9, 8)(inputs))
    elif kind == "custom":
        features = keras.layers.Concatenate()([inputs["a"], inputs["b"]])
    else:
        features = inputs
    hidden = keras.layers.Dense(
        8, activation="tanh", activity_regularizer=Mean() if kind == "custom" else None
    )(features)
    if kind == "custom":
        outputs = {"size": keras.layers.Dense(1)(hidden), "kind": keras.layers.Dense(2)(hidden)}
    else:
        outputs = keras.layers.Dense(num_outputs)(hidden)
    return keras.Model(inputs, outputs)


class Mean(keras.regularizers.Regularizer):
    """A loss of the model's own: the mean over the batch."""

    def __call__(self, x):
        # Keras divides by the batch size.
        return 0.1 * tf.reduce_mean(tf.square(x)) * tf.cast(tf.shape(x)[0], x.dtype)
