"""A model with an embedding table, clicks with an id out of range and a full disk, for tests of sharded tables."""

import resource

import keras
from keras import layers

from hvtrain.data.sources import interactions


def model(input_spec, category_sizes, num_outputs):
    """Begins with zeros, so that tables that are made in other ways are equal."""
    inputs = {
        name: keras.Input(spec.shape, dtype=spec.dtype, name=name)
        for name, spec in input_spec.items()
    }
    table = layers.Embedding(
        sum(category_sizes), 4, embeddings_initializer="zeros", name="user_table"
    )
    features = [layers.Flatten()(table(inputs["categories"])), inputs["numbers"]]
    hidden = layers.Dense(8, "tanh", name="hidden")(layers.Concatenate()(features))
    return keras.Model(inputs, layers.Dense(num_outputs, name="logits")(hidden))


class NoRoom(keras.callbacks.Callback):
    """Lets this process write no file of more than 100 kB while it trains."""

    def on_train_begin(self, logs=None):
        self.limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, self.limits[1]))

    def on_train_end(self, logs=None):
        resource.setrlimit(resource.RLIMIT_FSIZE, self.limits)


def clicks(bad_example, **options):
    """Drawn clicks of which one training example has ids below and above a table's."""
    source = interactions.clicks(**options)
    inputs, _ = source._load()["train"]
    inputs["categories"][bad_example] = [-1, 99]
    return source
