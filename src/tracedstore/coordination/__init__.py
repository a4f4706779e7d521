"""What ranks do together: barriers, exchange, who is who."""
