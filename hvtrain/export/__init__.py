"""`python -m hvtrain.export`: a finished run's model in another format, with its preprocessing."""
