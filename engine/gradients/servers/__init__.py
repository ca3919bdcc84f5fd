"""Parameter servers: shards that replicas push to, in step or not."""
