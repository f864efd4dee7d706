"""What a person has to decide: a rate in a variable, options in a dict, a step under XLA, no wrapped optimizer."""

import tensorflow as tf
from sklearn.datasets import load_digits

import horovod.tensorflow.keras as hvd

hvd.init()
tf.random.set_seed(hvd.rank())
x, y = load_digits(return_X_y=True)
x, y = x[hvd.rank()::hvd.size()] / 16, y[hvd.rank()::hvd.size()]

rate = tf.Variable(0.005, trainable=False)
warm = tf.keras.optimizers.Adam(learning_rate=rate)
options = {'lr': 0.005}
optimizer = tf.keras.optimizers.Adam(**options)


@tf.function(experimental_compile=True)
def norm(values):
    return tf.norm(values)


steps = tf.train.StopAtStepHook(last_step=100)
model = tf.keras.Sequential([
    tf.keras.layers.Dense(32, activation='relu', input_shape=(64,)),
    tf.keras.layers.Dense(10, activation='softmax'),
])
model.compile(optimizer=optimizer, loss='sparse_categorical_crossentropy')
model.fit(x, y, 32, 5, 0, callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)])
norm(model.get_weights()[0])
