"""How ranks work together. The runner knows the verbs of base.Strategy and nothing else."""
