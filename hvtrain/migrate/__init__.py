"""`python -m hvtrain migrate`: rewrites a script for Horovod on Keras 2 or tf.keras to hvtrain.keras on Keras 3."""
