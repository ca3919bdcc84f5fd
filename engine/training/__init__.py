"""The loop of one rank: samples, accumulation, evaluation, update."""
