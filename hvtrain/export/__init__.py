"""A finished run's model in the format of another program, with its preprocessing; `python -m hvtrain.export`."""
