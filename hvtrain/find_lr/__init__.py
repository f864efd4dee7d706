"""`python -m hvtrain.find_lr`: which learning rates a run can use."""
