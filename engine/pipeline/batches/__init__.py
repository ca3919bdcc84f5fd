"""What a step is fed with: a replica's share of a batch, cut into micro-batches."""
