"""What happens around the steps of a training: one callback, one file, one effect. The order is the runner's."""
