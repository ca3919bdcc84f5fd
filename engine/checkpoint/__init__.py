"""Checkpoints: the whole state of a training run on the disk, written as one, read as one, or refused by name."""
