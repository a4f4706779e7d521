"""The native recording base: one C++ source, its builder and its loader."""
