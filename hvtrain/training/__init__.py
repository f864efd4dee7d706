"""The parts of a run: setup, resume, checks between ranks, callbacks, tuning, and its end."""
