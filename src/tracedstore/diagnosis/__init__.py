"""Names the ranks that a hung job waits for, and why they do not arrive."""
