"""Gradients of several batches for each step, and a decaying rate."""

import keras
import numpy as np
from keras.layers import Dense
from keras.models import Sequential
from keras.optimizers import Adam
from sklearn.datasets import load_digits

import horovod.keras as hvd

hvd.init()
np.random.seed(hvd.rank())
x, y = load_digits(return_X_y=True)
x, y = x[hvd.rank()::hvd.size()] / 16, y[hvd.rank()::hvd.size()]

model = Sequential()
model.add(Dense(32, activation='relu', input_dim=64))
model.add(Dense(10, activation='softmax'))
opt = hvd.DistributedOptimizer(
    Adam(lr=0.005 * hvd.size(), decay=1e-3),
    backward_passes_per_step=2,
    average_aggregated_gradients=True,
)
model.compile(opt, 'sparse_categorical_crossentropy', metrics=['acc'])
model.fit(
    x, y,
    batch_size=16,
    epochs=5,
    verbose=0,
    callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0), hvd.callbacks.MetricAverageCallback()],
)
