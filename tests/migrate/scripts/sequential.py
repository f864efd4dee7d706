"""A Sequential model with callbacks, as most scripts were; the first convolution of the digits."""

from __future__ import print_function

import argparse

import tensorflow as tf
from sklearn.datasets import load_digits
from tensorflow import keras
from tensorflow.keras.layers import Conv2D, Dense, Dropout, Flatten
from tensorflow.keras.models import Sequential

import horovod.tensorflow.keras as hvd

parser = argparse.ArgumentParser()
parser.add_argument('--epochs', type=int, default=4)
parser.add_argument('--checkpoint-format', default='checkpoint-{epoch}.h5')
args = parser.parse_args()

hvd.init()

# Horovod: pin one GPU to each process.
gpus = tf.config.experimental.list_physical_devices('GPU')
for gpu in gpus:
    tf.config.experimental.set_memory_growth(gpu, True)
if gpus:
    tf.config.experimental.set_visible_devices(gpus[hvd.local_rank()], 'GPU')

tf.set_random_seed(hvd.rank())
x, y = load_digits(return_X_y=True)
x = (x / 16).reshape(-1, 8, 8, 1)[hvd.rank()::hvd.size()]
y = keras.utils.to_categorical(y[hvd.rank()::hvd.size()], 10)

model = Sequential([
    Conv2D(8, (3, 3), activation='relu', input_shape=(8, 8, 1)),
    Flatten(),
    Dropout(0.25),
    Dense(10, activation='softmax'),
])
opt = tf.keras.optimizers.Adam(lr=0.003 * hvd.size(), epsilon=None)
opt = hvd.DistributedOptimizer(opt)
model.compile(
    loss=keras.losses.categorical_crossentropy,
    optimizer=opt,
    metrics=['accuracy'],
    experimental_run_tf_function=False,
)
callbacks = [
    hvd.callbacks.BroadcastGlobalVariablesCallback(0),
    hvd.callbacks.MetricAverageCallback(),
    hvd.callbacks.LearningRateWarmupCallback(warmup_epochs=2, verbose=1),
]
if hvd.rank() == 0:
    callbacks.append(keras.callbacks.ModelCheckpoint(args.checkpoint_format, save_weights_only=True))
model.fit(x, y, batch_size=32, epochs=args.epochs, callbacks=callbacks, verbose=0)
