"""Opens a finished run for the commands that use it: settings, data, task, and model with weights."""
