"""An embedding and a recurrent layer, with the text tools of Keras 2."""

import numpy as np
import tensorflow as tf
from tensorflow.keras.layers import CuDNNLSTM, Dense, Embedding
from tensorflow.keras.preprocessing.sequence import pad_sequences
from tensorflow.keras.preprocessing.text import Tokenizer

import horovod.tensorflow.keras as hvd

hvd.init()
tf.random.set_seed(hvd.rank())
rng = np.random.RandomState(0)
good, bad = ["fine", "bright", "kind", "warm"], ["dull", "cold", "grim", "rude"]
labels = rng.randint(0, 2, 600)
texts = [" ".join(rng.choice(good if label else bad, rng.randint(3, 8))) for label in labels]

tokenizer = Tokenizer(num_words=20)
tokenizer.fit_on_texts(texts)
x = pad_sequences(tokenizer.texts_to_sequences(texts), maxlen=8)[hvd.rank()::hvd.size()]
y = labels[hvd.rank()::hvd.size()].astype("float32")

model = tf.keras.Sequential()
model.add(Embedding(20, 8, input_length=8))
model.add(CuDNNLSTM(8))
model.add(Dense(1, activation="sigmoid"))
opt = tf.keras.optimizers.Nadam(lr=0.01)
model.compile(optimizer=hvd.DistributedOptimizer(opt), loss="binary_crossentropy", metrics=["accuracy"])
model.fit(x, y, batch_size=32, epochs=3, verbose=0, callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)])
