"""A small residual network with a warm-up and a schedule by epochs, with the names of Keras before TensorFlow's."""

import horovod.keras as hvd
import keras
import numpy as np
from keras import backend as K
from keras.layers import Activation, Dense, Flatten, Input, add
from keras.layers.convolutional import Conv2D
from keras.layers.normalization import BatchNormalization
from keras.layers.pooling import MaxPooling2D
from keras.models import Model
from keras.regularizers import l2
from keras.utils import np_utils
from sklearn.datasets import load_digits

hvd.init()
np.random.seed(hvd.rank())
data = load_digits()
images = (data.images / 16)[hvd.rank()::hvd.size(), ..., None]
labels = np_utils.to_categorical(data.target[hvd.rank()::hvd.size()], 10)


def block(x, filters):
    shortcut = x
    x = Conv2D(filters, 3, padding='same', use_bias=False, kernel_regularizer=l2(1e-4))(x)
    x = BatchNormalization(axis=3 if K.image_data_format() == 'channels_last' else 1, momentum=0.8, fused=True)(x)
    x = Activation('relu')(x)
    return add([x, shortcut])


inputs = Input(shape=(8, 8, 1))
x = Conv2D(8, 3, padding='same')(inputs)
x = block(block(x, 8), 8)
outputs = Dense(10, activation='softmax')(Flatten()(MaxPooling2D()(x)))
model = Model(inputs=inputs, outputs=outputs)

opt = keras.optimizers.SGD(lr=0.05 * hvd.size(), momentum=0.9, decay=0.0, nesterov=True)
opt = hvd.DistributedOptimizer(opt, compression=hvd.Compression.fp16)
model.compile(optimizer=opt, loss='categorical_crossentropy', metrics=['accuracy'])
callbacks = [
    hvd.callbacks.BroadcastGlobalVariablesCallback(0),
    hvd.callbacks.MetricAverageCallback(),
    hvd.callbacks.LearningRateWarmupCallback(initial_lr=0.05 * hvd.size(), warmup_epochs=2),
    hvd.callbacks.LearningRateScheduleCallback(multiplier=1., start_epoch=2, end_epoch=5, initial_lr=0.05 * hvd.size()),
    hvd.callbacks.LearningRateScheduleCallback(multiplier=1e-1, start_epoch=5, initial_lr=0.05 * hvd.size()),
]


def batches(size=32):
    while True:
        chosen = np.random.randint(0, len(images), size)
        yield images[chosen], labels[chosen]


model.fit_generator(
    batches(),
    steps_per_epoch=25,
    epochs=6,
    callbacks=callbacks,
    workers=2,
    verbose=0,
)
score = model.evaluate_generator(batches(), steps=4)
