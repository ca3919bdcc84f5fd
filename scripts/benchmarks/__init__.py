"""The engine beside torch.distributed.pipelining, on the same layers, in one invocation. See `__main__`."""
