"""An elastic loop with a tape, as in Horovod's own examples."""

import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits

import horovod.tensorflow as hvd

hvd.init()
gpus = tf.config.experimental.list_physical_devices('GPU')
for gpu in gpus:
    tf.config.experimental.set_memory_growth(gpu, True)
if gpus:
    tf.config.experimental.set_visible_devices(gpus[hvd.local_rank()], 'GPU')

tf.random.set_seed(hvd.rank())
x, y = load_digits(return_X_y=True)
dataset = tf.data.Dataset.from_tensor_slices(((x / 16).astype(np.float32), y))
dataset = dataset.shard(hvd.size(), hvd.rank()).repeat().shuffle(500, seed=hvd.rank()).batch(32)

model = tf.keras.Sequential([
    tf.keras.layers.Dense(32, activation='relu', input_shape=(64,)),
    tf.keras.layers.Dense(10, activation='softmax'),
])
loss = tf.losses.SparseCategoricalCrossentropy()
opt = tf.optimizers.Adam(0.002 * hvd.size())


@tf.function
def train_one_batch(images, labels):
    with tf.GradientTape() as tape:
        loss_value = loss(labels, model(images, training=True))
    tape = hvd.DistributedGradientTape(tape)
    gradients = tape.gradient(loss_value, model.trainable_variables)
    opt.apply_gradients(zip(gradients, model.trainable_variables))
    return loss_value


opt.apply_gradients(zip([tf.zeros_like(v) for v in model.trainable_variables], model.trainable_variables))


@hvd.elastic.run
def train(state):
    for batch, (images, labels) in enumerate(dataset.skip(state.batch).take(120 - state.batch)):
        train_one_batch(images, labels)
        state.batch += 1
        if batch % 40 == 0:
            state.commit()


state = hvd.elastic.TensorFlowKerasState(model, opt, batch=0)
train(state)
