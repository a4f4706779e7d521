"""What all packages use: errors, identity, threads, signals, /proc, codec, causes."""
