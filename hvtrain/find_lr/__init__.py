"""`python -m hvtrain.find_lr`: a learning-rate range test."""
