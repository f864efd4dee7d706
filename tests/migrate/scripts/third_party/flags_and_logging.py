"""Options and messages by the tools of TensorFlow 1."""

import tensorflow as tf
from sklearn.datasets import load_digits
from tensorflow.keras.layers import Dense
from tensorflow.keras.models import Sequential

import horovod.tensorflow.keras as hvd

flags = tf.app.flags
flags.DEFINE_integer('digit_epochs', 5, 'Epochs.')
flags.DEFINE_float('digit_rate', 0.005, 'Rate of a rank.')
flags.DEFINE_string('digit_folder', 'digits-log', 'Folder of the records.')
FLAGS = flags.FLAGS
FLAGS(['flags_and_logging.py'])

hvd.init()
tf.logging.set_verbosity(tf.logging.ERROR)
tf.set_random_seed(hvd.rank())
if hvd.rank() == 0 and not tf.gfile.Exists(FLAGS.digit_folder):
    tf.gfile.MakeDirs(FLAGS.digit_folder)
x, y = load_digits(return_X_y=True)
x, y = x[hvd.rank()::hvd.size()] / 16, y[hvd.rank()::hvd.size()]

model = Sequential([Dense(32, activation='relu', input_shape=(64,)), Dense(10, activation='softmax')])
opt = hvd.DistributedOptimizer(tf.keras.optimizers.Adam(lr=FLAGS.digit_rate))
model.compile(opt, 'sparse_categorical_crossentropy', metrics=['accuracy'])
callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0)]
model.fit(x, y, 32, FLAGS.digit_epochs, 0, callbacks)
tf.logging.info('trained')
