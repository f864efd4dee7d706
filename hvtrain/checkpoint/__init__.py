"""Checkpoints on disk: their format, and the background writer."""
