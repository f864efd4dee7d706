"""Values and arithmetic of a run (topology, step plan, schedules, buckets, figures), and the table of commands.

Imports only the standard library and hvtrain.errors.
"""

# Defined here and not in hvtrain/__init__.py, so that every subpackage can import it.
VERSION = "0.1.0"
