"""Values and arithmetic of a run: topology, step plan, schedules, gradient buckets; the table of commands.

Imports only the standard library.
"""

# Not in the package's API, so that every subpackage may import it.
VERSION = "0.1.0"
