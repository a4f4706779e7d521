"""Whom a stalled job waits for, from what its processes published."""
