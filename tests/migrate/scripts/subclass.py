"""A model class with a train_step of its own, under tf.keras."""

import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits
from tensorflow.keras import layers

import horovod.tensorflow.keras as hvd

hvd.init()
gpus = tf.config.list_physical_devices('GPU')
if gpus:
    try:
        tf.config.set_visible_devices(gpus[hvd.local_rank()], 'GPU')
        tf.config.experimental.set_memory_growth(gpus[hvd.local_rank()], True)
    except RuntimeError as error:
        print(error)


class Net(tf.keras.Model):
    def __init__(self):
        super(Net, self).__init__()
        self.hidden = layers.Dense(32)
        self.slope = layers.LeakyReLU(alpha=0.1)
        self.out = layers.Dense(10)
        self.loss_tracker = tf.keras.metrics.Mean(name='loss')

    def call(self, x, training=False):
        return self.out(self.slope(self.hidden(x)))

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compiled_loss(y, self(x, training=True), regularization_losses=self.losses)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables))
        self.loss_tracker.update_state(loss)
        return {'loss': self.loss_tracker.result()}


tf.random.set_seed(hvd.rank())
x, y = load_digits(return_X_y=True)
dataset = tf.data.Dataset.from_tensor_slices(((x / 16).astype(np.float32), y))
dataset = dataset.shard(hvd.size(), hvd.rank()).shuffle(2000).batch(32, drop_remainder=True)

model = Net()
model.compile(
    optimizer=hvd.DistributedOptimizer(tf.optimizers.RMSprop(0.002 * hvd.size())),
    loss=tf.losses.SparseCategoricalCrossentropy(from_logits=True),
    run_eagerly=False,
)
model.fit(dataset, epochs=4, verbose=0, callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)])
