"""Reads a running job from outside, as one more client of its store and its ranks."""
