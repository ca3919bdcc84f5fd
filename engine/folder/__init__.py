"""What lies in a run's folder: files written whole or not at all, and read against schemas."""
