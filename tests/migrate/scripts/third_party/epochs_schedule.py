"""A rate by epochs, a warm-up and gradients that are added up, with the schedules of Horovod before 0.20."""

import horovod.keras as hvd
import keras
import tensorflow as tf
from keras.layers import Activation, BatchNormalization, Dense
from sklearn.datasets import load_digits

hvd.init()
tf.random.set_seed(hvd.rank())
x, y = load_digits(return_X_y=True)
x, y = x[hvd.rank()::hvd.size()] / 16, keras.utils.to_categorical(y[hvd.rank()::hvd.size()], 10)

model = keras.models.Sequential()
model.add(Dense(48, input_shape=(64,), kernel_regularizer=keras.regularizers.l2(5e-5)))
model.add(BatchNormalization(fused=True))
model.add(Activation('relu'))
model.add(Dense(10, activation='softmax'))
opt = keras.optimizers.SGD(lr=0.02 * hvd.size(), momentum=0.9)
model.compile(optimizer=hvd.DistributedOptimizer(opt, backward_passes_per_step=2), loss='categorical_crossentropy')
callbacks = [
    hvd.callbacks.BroadcastGlobalVariablesCallback(0),
    hvd.callbacks.LearningRateWarmupCallback(warmup_epochs=2, verbose=0),
    hvd.callbacks.LearningRateScheduleCallback(start_epoch=2, end_epoch=6, multiplier=1.),
    hvd.callbacks.LearningRateScheduleCallback(start_epoch=6, end_epoch=8, multiplier=1e-1),
    hvd.callbacks.LearningRateScheduleCallback(start_epoch=8, multiplier=lambda epoch: 1e-2),
]
model.fit(x, y, batch_size=16, epochs=9, verbose=0, callbacks=callbacks)
