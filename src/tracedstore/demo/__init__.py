"""A job of real processes on this machine, which loses two ranks and tells of it."""
