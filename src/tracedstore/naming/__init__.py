"""Names of ranks: launchers' variables, rosters, decoders, and ranges of ranks."""
