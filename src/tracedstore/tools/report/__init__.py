"""Turns the log files of a finished job into one HTML page. Needs no store."""
