"""Keras on a session of TensorFlow 1, which gave each rank its GPU."""

import tensorflow.compat.v1 as tf
import tensorflow.compat.v1.keras.backend as K
from sklearn.datasets import load_digits
from tensorflow.compat.v1.keras.layers import Dense, Input
from tensorflow.compat.v1.keras.models import Model

import horovod.keras as hvd

# Horovod: initialize Horovod.
hvd.init()

# Horovod: pin GPU to be used to process local rank (one GPU per process)
config = tf.ConfigProto()
config.gpu_options.allow_growth = True
config.gpu_options.visible_device_list = str(hvd.local_rank())
K.set_session(tf.Session(config=config))

tf.set_random_seed(hvd.rank())
x, y = load_digits(return_X_y=True)
x, y = x[hvd.rank()::hvd.size()] / 16, y[hvd.rank()::hvd.size()]

inputs = Input(shape=(64,))
outputs = Dense(10, activation='softmax')(Dense(32, activation='tanh')(inputs))
model = Model(inputs, outputs)
opt = tf.keras.optimizers.Adadelta(1.0 * hvd.size())
model.compile(loss='sparse_categorical_crossentropy', optimizer=hvd.DistributedOptimizer(opt), metrics=['accuracy'])
callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0)]
if hvd.rank() == 0:
    callbacks.append(tf.keras.callbacks.ModelCheckpoint('./session-{epoch}.h5'))
model.fit(x, y, batch_size=32, callbacks=callbacks, nb_epoch=5, verbose=0)
