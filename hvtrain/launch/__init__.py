"""Starting a run on many machines: over ssh, or by the files that a cluster's scheduler takes."""
