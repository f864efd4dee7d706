"""Predictions of a finished run for a split of its data or for files; `python -m hvtrain.predict` writes them."""
