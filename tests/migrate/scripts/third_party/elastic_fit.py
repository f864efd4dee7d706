"""An elastic fit; the callbacks are named through horovod.tensorflow."""

import tensorflow as tf
from sklearn.datasets import load_digits

import horovod.tensorflow as hvd
import horovod.tensorflow.keras.elastic as elastic

hvd.init()
tf.random.set_seed(hvd.rank())
x, y = load_digits(return_X_y=True)
x, y = x[hvd.rank()::hvd.size()] / 16, y[hvd.rank()::hvd.size()]
num_batches = len(x) // 32

model = tf.keras.Sequential([
    tf.keras.layers.Dense(32, activation='relu', input_shape=(64,)),
    tf.keras.layers.Dense(10, activation='softmax'),
])
opt = hvd.keras.DistributedOptimizer(tf.keras.optimizers.Adam(lr=0.005))
model.compile(loss='sparse_categorical_crossentropy', optimizer=opt, experimental_run_tf_function=False)
state = elastic.KerasState(model, batch=0, epoch=0)
callbacks = [
    hvd.keras.callbacks.MetricAverageCallback(),
    elastic.UpdateBatchStateCallback(state),
    elastic.UpdateEpochStateCallback(state),
    elastic.CommitStateCallback(state),
]


@hvd.elastic.run
def train(state):
    model.fit(
        x, y, batch_size=32, steps_per_epoch=num_batches, callbacks=callbacks, epochs=5 - state.epoch, verbose=0,
    )


train(state)
