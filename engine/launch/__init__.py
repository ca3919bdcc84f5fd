"""Start ranks as processes, as threads, or as a launcher's, and say how the run ended."""
