"""Checkpoints on disk: their format, and the writer in the background."""
