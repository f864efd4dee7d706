"""Predicts a step's time on many ranks from links, all-reduce, fusion, overlap and stragglers. Pure."""
