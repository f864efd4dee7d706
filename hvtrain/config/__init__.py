"""The configuration of a run: its typed schema, validation, composition with Hydra, and the objects it names."""
