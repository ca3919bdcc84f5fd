"""What a run measures while it runs: records, spans, clocks, and where each rank is."""
