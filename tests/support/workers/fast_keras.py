"""Imports Keras as the runner does, without what no rank uses, which is a third of a worker's start.

A worker imports it before Keras and hvtrain.
"""

from hvtrain.system import console

with console.quiet_import(verbose=True):
    import keras  # noqa: F401
