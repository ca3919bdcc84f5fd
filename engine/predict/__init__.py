"""What a run measured, put together for another configuration."""
