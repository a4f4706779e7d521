"""How one process asks another what it does: sockets, questions in the store."""
