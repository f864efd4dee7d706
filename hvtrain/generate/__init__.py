"""`python -m hvtrain.generate`: a text, continued by a finished language run."""
