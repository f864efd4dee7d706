"""Contenders written by hand, as a user would who had no hvtrain."""
