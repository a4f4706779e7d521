"""Zero code: the stores that torch makes by itself become traced."""
