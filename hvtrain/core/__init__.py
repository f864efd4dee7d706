"""Values and arithmetic of a run: topology, step plan, schedules, gradient buckets; the table of commands.

Imports only the standard library.
"""

# Defined here and not in hvtrain/__init__.py, so that every subpackage can import it.
VERSION = "0.1.0"
