"""A metric and an optimizer of one's own, and metrics that a loop resets."""

import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits

import horovod.tensorflow as hvd

hvd.init()
tf.random.set_seed(hvd.rank())
x, y = load_digits(return_X_y=True)
dataset = tf.data.Dataset.from_tensor_slices(((x / 16).astype(np.float32), y))
dataset = dataset.shard(hvd.size(), hvd.rank()).shuffle(500).batch(32, drop_remainder=True)


class Worst(tf.keras.metrics.Metric):
    def __init__(self):
        super().__init__(name='worst')
        self.value = self.add_weight(name='value', initializer='zeros')

    def update_state(self, loss):
        self.value.assign(tf.maximum(self.value, loss))

    def result(self):
        return self.value

    def reset_states(self):
        self.value.assign(0.0)


class Halved(tf.keras.optimizers.SGD):
    def __init__(self, lr=0.01, **kwargs):
        super().__init__(lr=lr / 2, **kwargs)


model = tf.keras.Sequential([tf.keras.layers.Dense(32, activation='relu'), tf.keras.layers.Dense(10)])
model.build((None, 64))
loss_object = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
mean, worst = tf.keras.metrics.Mean(), Worst()
opt = Halved(0.2 * hvd.size(), momentum=0.9)
hvd.broadcast_variables(model.variables, root_rank=0)


@tf.function(experimental_relax_shapes=True)
def step(images, labels):
    with tf.GradientTape() as tape:
        loss = loss_object(labels, model(images, training=True))
    gradients = hvd.DistributedGradientTape(tape).gradient(loss, model.trainable_variables)
    opt.apply_gradients(zip(gradients, model.trainable_variables))
    mean.update_state(loss)
    worst.update_state(loss)


for epoch in range(5):
    mean.reset_states()
    worst.reset_states()
    for images, labels in dataset:
        step(images, labels)
assert float(worst.result()) >= float(mean.result()) > 0
