"""Checkpoints and records of rank 0, which are made above; and callbacks that every rank has."""

import keras
import tensorflow as tf
from sklearn.datasets import load_digits

import horovod.keras as hvd

hvd.init()
is_master = hvd.rank() == 0
tf.random.set_seed(hvd.rank())
x, y = load_digits(return_X_y=True)
x, y = x[hvd.rank()::hvd.size()] / 16, y[hvd.rank()::hvd.size()]

model = keras.models.Sequential([keras.layers.Dense(32, 'relu', input_shape=(64,)), keras.layers.Dense(10, 'softmax')])
opt = keras.optimizers.RMSprop(lr=0.002 * hvd.size())
model.compile(hvd.DistributedOptimizer(opt), 'sparse_categorical_crossentropy', metrics=['accuracy'])
checkpoint = keras.callbacks.ModelCheckpoint('digits-{epoch:02d}.h5', save_weights_only=True)
records = [keras.callbacks.CSVLogger('digits.csv')]
callbacks = [
    hvd.callbacks.BroadcastGlobalVariablesCallback(0),
    hvd.callbacks.MetricAverageCallback(),
    keras.callbacks.ReduceLROnPlateau(monitor='loss', patience=10, epsilon=1e-3),
    keras.callbacks.EarlyStopping(monitor='loss', patience=10),
]
if is_master:
    callbacks.append(checkpoint)
    callbacks += records
model.fit(x, y, batch_size=32, callbacks=callbacks, epochs=6, verbose=0)
hvd.allreduce([0.0], name='written')
model.load_weights('digits-06.h5')
