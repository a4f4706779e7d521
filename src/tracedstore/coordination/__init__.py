"""What ranks do together: barrier, arrivals, rank registry, decoders, exchange."""
