"""Runs on each rank: scripts, one after the other; what each of them ends with is given back by its name.

Its arguments are a file for what is found, then the scripts, each with its own arguments in the same word. A script
trains a `model`, on x and y or images and labels, or leaves its `weights` and `accuracy`.
"""

import json
import random
import runpy
import shlex
import sys
from pathlib import Path

import keras
import numpy as np

import hvtrain.keras as hvd


def accuracy(names):
    if "weights" in names:
        return names["accuracy"]
    x, y = (names["images"], names["labels"]) if "images" in names else (names["x"], names["y"])
    predictions = names["model"].predict(x, verbose=0)
    labels = np.asarray(y)
    classes = predictions.argmax(axis=-1) if predictions.shape[-1] > 1 else predictions[:, 0] > 0.5
    return float(np.mean(classes == (labels.argmax(axis=-1) if labels.ndim > 1 else labels)))


def run(script):
    keras.config.set_dtype_policy("float32")
    random.seed(hvd.rank())
    sys.argv = shlex.split(script)
    try:
        names = runpy.run_path(sys.argv[0], run_name="__main__")
    except Exception as error:
        return {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"}
    weights = names.get("weights") or names["model"].trainable_variables
    weights = np.concatenate([np.ravel(weight) for weight in weights])
    ranks = hvd.allgather_object(weights)
    return {"gap": float(np.max(np.abs(ranks[0] - ranks[-1]))), "accuracy": accuracy(names)}


hvd.init()
_, results, *scripts = sys.argv
by_script = {script: run(script) for script in scripts}
everything = hvd.allgather_object(by_script)
if hvd.rank() == 0:
    Path(results).write_text(json.dumps(everything))
