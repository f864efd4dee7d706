"""A model whose compile takes two optimizers, and whose train_step steps both."""

import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits

import horovod.tensorflow.keras as hvd

hvd.init()
tf.random.set_seed(hvd.rank())
x, y = load_digits(return_X_y=True)
x, y = (x / 16).astype(np.float32)[hvd.rank()::hvd.size()], y[hvd.rank()::hvd.size()]


class TwoParts(tf.keras.Model):
    def __init__(self):
        super().__init__()
        self.features = tf.keras.layers.Dense(32, activation='relu')
        self.classifier = tf.keras.layers.Dense(10)
        self.loss_tracker = tf.keras.metrics.Mean(name='loss')

    def compile(self, f_optimizer, c_optimizer):
        super().compile(experimental_run_tf_function=False)
        self.f_optimizer = f_optimizer
        self.c_optimizer = c_optimizer

    def call(self, inputs):
        return self.classifier(self.features(inputs))

    def train_step(self, data):
        x, y = data
        with tf.GradientTape(persistent=True) as tape:
            loss = tf.reduce_mean(tf.keras.losses.sparse_categorical_crossentropy(y, self(x), from_logits=True))
        for part, optimizer in ((self.features, self.f_optimizer), (self.classifier, self.c_optimizer)):
            gradients = tape.gradient(loss, part.trainable_variables)
            optimizer.apply_gradients(zip(gradients, part.trainable_variables))
        self.loss_tracker.update_state(loss)
        return {'loss': self.loss_tracker.result()}


model = TwoParts()
model.build((None, 64))
model.compile(
    hvd.DistributedOptimizer(tf.keras.optimizers.Adam(lr=0.005)),
    hvd.DistributedOptimizer(tf.keras.optimizers.SGD(lr=0.1 * hvd.size())),
)
model.fit(x, y, batch_size=32, epochs=6, verbose=0, callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)])
