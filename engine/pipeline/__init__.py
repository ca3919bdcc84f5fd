"""The heart: `engine.Pipeline`, a model over several ranks, and the executor of programs that it runs on."""
