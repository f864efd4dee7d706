"""What `python -m hvtrain.plan` is made of: the run's arithmetic, its machine, what is printed, drawn and measured."""
