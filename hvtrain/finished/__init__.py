"""A finished run opened again, for the commands that use it: its settings, data, task, and model with weights."""
