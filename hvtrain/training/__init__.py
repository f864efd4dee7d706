"""The parts of a training run: setup, checks between ranks, callbacks, tuning, and what is written at the end."""
