"""Compares strategies on the same training: speed, learning, and the conclusions."""
