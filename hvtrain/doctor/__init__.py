"""Finds what is wrong with a cluster before a run does: collects facts from each host and judges them together."""
