"""Fuzzers for the parsers of input that anyone can write: see docs/fuzzing.md."""
