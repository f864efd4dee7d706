"""Checks that show on any cluster whether ranks train together; `python -m hvtrain.verify` runs them."""
