"""The parts of `python -m hvtrain plan`: a run's arithmetic, its machine, and the report."""
