"""What lies in a run's folder, read against schemas, and the rows of a sweep's jobs."""
