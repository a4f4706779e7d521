"""What one call was, and how it is recorded. Knows no signal and no exporter."""
