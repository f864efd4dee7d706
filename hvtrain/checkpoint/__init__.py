"""Checkpoints on disk: their format, the background writer, and notes that say where the newest one is."""
