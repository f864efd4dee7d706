"""`python -m hvtrain.find_batch`: the largest and the fastest batch."""
