"""`python -m hvtrain.sweep`: the settings of a run with which it learns best, found by trying."""
