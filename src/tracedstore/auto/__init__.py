"""Zero code: what torch makes by itself, and its own tools, become traced."""
