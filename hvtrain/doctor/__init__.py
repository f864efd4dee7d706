"""What is wrong with a cluster, before a run finds out: facts from each host, judged together."""
