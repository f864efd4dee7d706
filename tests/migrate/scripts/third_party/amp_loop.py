"""A loop in half precision, which scales the loss and unscales the gradients by hand."""

import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits
from tensorflow.keras import mixed_precision

import horovod.tensorflow as hvd

hvd.init()
mixed_precision.set_global_policy('mixed_float16')
tf.random.set_seed(hvd.rank())
x, y = load_digits(return_X_y=True)
dataset = tf.data.Dataset.from_tensor_slices(((x / 16).astype(np.float32), y))
dataset = dataset.shard(hvd.size(), hvd.rank()).repeat().shuffle(500).batch(32)

model = tf.keras.Sequential([
    tf.keras.layers.Dense(48, activation='relu', input_shape=(64,)),
    tf.keras.layers.Dense(10, dtype='float32'),
])
loss_object = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
opt = tf.keras.optimizers.Adam(0.002 * hvd.size())
opt = mixed_precision.LossScaleOptimizer(opt, dynamic=True)


@tf.function
def train_step(images, labels, first_batch):
    with tf.GradientTape() as tape:
        loss = loss_object(labels, model(images, training=True))
        scaled_loss = opt.get_scaled_loss(loss)
    tape = hvd.DistributedGradientTape(tape, compression=hvd.Compression.fp16)
    scaled_gradients = tape.gradient(scaled_loss, model.trainable_variables)
    gradients = opt.get_unscaled_gradients(scaled_gradients)
    opt.apply_gradients(zip(gradients, model.trainable_variables))
    if first_batch:
        hvd.broadcast_variables(model.variables, root_rank=0)
        hvd.broadcast_variables(opt.variables(), root_rank=0)
    return loss


for step, (images, labels) in enumerate(dataset.take(150)):
    train_step(images, labels, step == 0)
