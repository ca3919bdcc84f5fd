"""Weights of the whole model as files: written at the end of a run, read at the start of one."""
