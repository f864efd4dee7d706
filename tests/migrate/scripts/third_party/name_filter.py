"""Weight decay by hand on some of the weights, which their names choose."""

import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits

import horovod.tensorflow as hvd

hvd.init()
tf.random.set_seed(hvd.rank())
x, y = load_digits(return_X_y=True)
dataset = tf.data.Dataset.from_tensor_slices(((x / 16).astype(np.float32), y))
dataset = dataset.shard(hvd.size(), hvd.rank()).repeat().shuffle(500).batch(32)

model = tf.keras.Sequential([
    tf.keras.layers.Dense(32, input_shape=(64,)),
    tf.keras.layers.BatchNormalization(),
    tf.keras.layers.ReLU(),
    tf.keras.layers.Dense(10),
])
opt = tf.keras.optimizers.Adam(lr=0.002 * hvd.size(), decay=1e-4)


def loss_of(images, labels):
    logits = model(images, training=True)
    loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits))
    decay = [tf.nn.l2_loss(v) for v in model.trainable_variables if 'kernel' in v.name]
    rest = [tf.nn.l2_loss(v) for v in model.trainable_variables if 'batch_normalization' not in v.name]
    return loss + 1e-4 * tf.add_n(decay) + 1e-6 * tf.add_n(rest)


@tf.function
def step(images, labels):
    with hvd.DistributedGradientTape(tf.GradientTape()) as tape:
        loss = loss_of(images, labels)
    gradients = tape.gradient(loss, model.trainable_variables)
    opt.apply_gradients(zip(gradients, model.trainable_variables))


hvd.broadcast_variables(model.variables, root_rank=0)
for images, labels in dataset.take(150):
    step(images, labels)
