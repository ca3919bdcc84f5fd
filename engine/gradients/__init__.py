"""Gradients and who sums them: buckets, shards, compression."""
