"""The record of one call: the Store proxy, counters, recorder, snapshot."""
