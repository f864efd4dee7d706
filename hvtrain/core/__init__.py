"""Values and arithmetic of a run: topology, step plan, schedules, gradient buckets; the table of commands.

Pure, without TensorFlow.
"""

# The version of hvtrain. It is here, and not in the package's API, so that every room may import it.
VERSION = "0.1.0"
