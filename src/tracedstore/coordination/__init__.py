"""Coordination of ranks: barriers, data exchange, the rank registry and names."""
