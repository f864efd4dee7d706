"""A user's functions that return pipelines: right ones, and some with mistakes."""

import keras
import numpy as np
import tensorflow as tf

from hvtrain.data import from_dataset

NUM = {"train": 61, "test": 23}


def leaves(split):
    """Points near one of three corners, all different, and which corner it is."""
    labels = np.arange(NUM[split]) % 3
    noise = np.random.default_rng(len(labels)).normal(0, 0.1, (len(labels), 3))
    return np.eye(3)[labels] + noise, labels


def shuffled(shard, num_shards, split):
    if split == "validation":
        return None
    return tf.data.Dataset.from_tensor_slices(leaves(split)).shard(num_shards, shard).shuffle(100)


def by_epoch(shard, num_shards, epoch, seed, start):
    """Ordered by NumPy, and without what the run has seen."""
    x, y = (array[shard::num_shards] for array in leaves("train"))
    rows = np.random.default_rng((seed, epoch, shard)).permutation(len(x))[start:]
    return tf.data.Dataset.from_tensor_slices((x[rows], y[rows]))


class Leaves(keras.utils.PyDataset):
    """Rows in an order that changes with each epoch."""

    def __init__(self, arrays, batch_size, seed):
        super().__init__(workers=2)
        self.arrays, self.batch_size, self.random = arrays, batch_size, np.random.default_rng(seed)
        self.on_epoch_end()

    def __len__(self):
        return -(-len(self.arrays[0]) // self.batch_size)

    def __getitem__(self, number):
        rows = self.order[number * self.batch_size : (number + 1) * self.batch_size]
        return tuple(array[rows] for array in self.arrays)

    def on_epoch_end(self):
        self.order = self.random.permutation(len(self.arrays[0]))


def batches(shard, num_shards, split, batch_size, seed):
    if split != "validation":
        return Leaves([array[shard::num_shards] for array in leaves(split)], batch_size, seed)
    return None


def batches_of_five(shard, num_shards, seed):
    return Leaves([array[shard::num_shards] for array in leaves("train")], 5, seed)


def batches_from_start(shard, num_shards, seed, start):
    """Leaves out what a resumed run has seen, as only a pipeline may."""
    return Leaves([array[shard::num_shards][start:] for array in leaves("train")], 5, seed)


def ignoring(shard, num_shards):
    return shuffled(0, 1, "train").filter(lambda x, y: True)


def short(shard, num_shards):
    return shuffled(shard, num_shards, "train").take(9 if shard else 99)


def short_unseen(shard, num_shards):
    return short(shard, num_shards).filter(lambda x, y: True)


def failing(shard, num_shards):
    return 1 // shard  # failing


def failing_later(shard, num_shards, epoch):
    return shuffled(shard, num_shards, "train") if epoch == 0 else [][epoch]  # later


def model(input_shape, num_outputs, **_):
    layers = [keras.Input(input_shape), keras.layers.Dense(8, "relu"), keras.layers.Dropout(0.2)]
    return keras.Sequential([*layers, keras.layers.Dense(num_outputs)])


def data(how, number=None, **_):
    return from_dataset(globals()[how], num_examples=number, num_classes=3)
