"""A model with an embedding table, and a callback that fails, for tests of sharded tables."""

import keras
from keras import layers


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


class Fail(keras.callbacks.Callback):
    """Raises an error after a batch."""

    def __init__(self, batch):
        super().__init__()
        self.batch = batch

    def on_train_batch_end(self, batch, logs=None):
        if batch == self.batch:
            raise RuntimeError("failed on purpose")
