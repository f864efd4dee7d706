"""Text that a finished language run goes on with; `python -m hvtrain.generate` prints it."""
