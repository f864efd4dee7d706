"""A legacy optimizer with a decay, weights on rank 0, and a predicted class."""

import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits

import horovod.tensorflow.keras as hvd

hvd.init()
tf.random.set_seed(hvd.rank())
x, y = load_digits(return_X_y=True)
x, y = x / 16, y
mine = slice(hvd.rank(), None, hvd.size())

model = tf.keras.models.Sequential()
model.add(tf.keras.layers.Dense(48, activation="relu", input_shape=(64,)))
model.add(tf.keras.layers.experimental.preprocessing.Rescaling(2.0))
model.add(tf.keras.layers.Dense(10, activation="softmax"))
optimizer = tf.keras.optimizers.legacy.SGD(lr=0.05 * hvd.size(), decay=1e-3, momentum=0.9)
model.compile(loss="sparse_categorical_crossentropy", optimizer=hvd.DistributedOptimizer(optimizer))
broadcast = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
model.fit(x[mine], y[mine], batch_size=32, epochs=5, verbose=0, callbacks=[broadcast])
name = "weights-%d.h5" % hvd.size()
if hvd.rank() == 0:
    model.save_weights(name)
    model.load_weights(name)
classes = np.argmax(model.predict_proba(x[:10]), axis=-1)
