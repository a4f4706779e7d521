"""Counts the requests that torch's EtcdStore makes inside one call."""
