"""Searches over many short trainings: sweep, find_lr, find_batch."""
