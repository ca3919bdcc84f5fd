"""From the data set to what a step is fed: batches, their order, a replica's share."""
