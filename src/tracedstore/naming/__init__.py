"""Names of ranks: decoders of launchers' variables, and their rosters."""
