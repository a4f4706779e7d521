"""A demo job of real processes on this machine, which loses two ranks."""
