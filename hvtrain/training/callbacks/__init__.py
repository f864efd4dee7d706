"""Callbacks of a run, each with one effect. Their order is in order.py."""
