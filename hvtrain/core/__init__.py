"""Values and arithmetic of a run: topology, step plan, schedules, gradient buckets, records.

Pure, without TensorFlow.
"""
