"""Contenders written by hand, as a user without hvtrain would write them."""
