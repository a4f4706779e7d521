"""A live job, seen from outside: its store read as one more client, its ranks asked."""
