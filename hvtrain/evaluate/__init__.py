"""Metrics of a finished run on any split of its data, or on other data; `python -m hvtrain.evaluate` prints them."""
