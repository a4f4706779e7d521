"""Why a store cannot be reached: addresses, ports, servers and files."""
