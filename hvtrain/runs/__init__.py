"""`python -m hvtrain.runs`: the runs in a folder."""
