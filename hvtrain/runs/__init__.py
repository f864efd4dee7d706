"""`python -m hvtrain.runs`: lists the runs in a folder."""
