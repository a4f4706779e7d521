"""What this process waits for, and what it publishes about that."""
