"""One stage on one rank: its layers, the graphs of micro-batches in flight, split backward, weight versions."""
