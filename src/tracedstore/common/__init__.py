"""What all packages use: clock, errors, identity, threads, /proc, validation."""
