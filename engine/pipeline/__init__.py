"""The heart: a stage, what crosses its boundary, and the executor of a program."""
