"""Checkpoints on disk: format, background writer, and notes of where the newest one is."""
