"""The six primitives and the barrier, over any subset of ranks."""
