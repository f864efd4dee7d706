"""The notice that is sent when a run ends: rank 0's side, and the process that sends it and outlives rank 0."""
