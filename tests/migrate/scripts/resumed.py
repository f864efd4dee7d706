"""Saves on rank 0, then goes on from the file, with a layer and a loss of its own."""

import os

import tensorflow as tf
import tensorflow.keras.backend as K
from sklearn.datasets import load_digits
from tensorflow import keras

import horovod.tensorflow.keras as hvd

hvd.init()
tf.random.set_seed(hvd.rank())
x, y = load_digits(return_X_y=True)
x = x[hvd.rank()::hvd.size()] / 16
y = keras.utils.to_categorical(y[hvd.rank()::hvd.size()], 10)
FOLDER = 'saved'
path = os.path.join(FOLDER, 'model')


class Scaled(keras.layers.Layer):
    def build(self, input_shape):
        self.scale = self.add_weight(name='scale', shape=(int(input_shape[-1]),), initializer='ones')

    def call(self, inputs):
        return inputs * self.scale


def smoothed(y_true, y_pred):
    return -K.mean(K.log(K.clip(y_pred, K.epsilon(), 1.0)) * (0.9 * y_true + 0.01), axis=-1)


objects = {'Scaled': Scaled, 'smoothed': smoothed}
broadcast = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
model = keras.Sequential([keras.layers.Dense(32, 'relu', input_shape=(64,)), Scaled(), keras.layers.Dense(10, 'softmax')])
model.compile(optimizer=hvd.DistributedOptimizer(keras.optimizers.Adam(lr=0.01)), loss=smoothed, metrics=['accuracy'])
model.fit(x, y, batch_size=32, epochs=3, callbacks=[broadcast], verbose=0)
if hvd.rank() == 0:
    os.makedirs(FOLDER, exist_ok=True)
    model.save(path)
hvd.allreduce([0.0], name='saved')

model = hvd.load_model(path, custom_objects=objects)
model.optimizer.lr = 0.005
model.fit(x, y, batch_size=32, epochs=5, initial_epoch=3, callbacks=[broadcast], verbose=0)
