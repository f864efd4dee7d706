"""Callbacks of a run, each with one effect. make_callbacks.py sets their order."""
