"""What is shown and measured but trains nothing of the engine's own: data parallelism in one process."""
