"""Mixed precision, and float16 on the wire."""

import tensorflow as tf
from sklearn.datasets import load_digits
from tensorflow.keras.mixed_precision import experimental as mixed_precision

import horovod.tensorflow.keras as hvd

hvd.init()
policy = mixed_precision.Policy('mixed_float16')
mixed_precision.set_policy(policy)

tf.random.set_seed(hvd.rank())
x, y = load_digits(return_X_y=True)
x, y = x[hvd.rank()::hvd.size()] / 16, y[hvd.rank()::hvd.size()]

inputs = tf.keras.Input((64,))
hidden = tf.keras.layers.Dense(32, activation='relu')(inputs)
outputs = tf.keras.layers.Dense(10, dtype='float32')(hidden)
model = tf.keras.Model(inputs, outputs)
loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=tf.keras.losses.Reduction.AUTO)
opt = tf.keras.optimizers.Adam(learning_rate=0.003 * hvd.size())
opt = hvd.DistributedOptimizer(opt, compression=hvd.Compression.fp16)
model.compile(opt, loss=loss, metrics=['accuracy'])
model.fit(x, y, 32, 5, 0, [hvd.callbacks.BroadcastGlobalVariablesCallback(0)])
