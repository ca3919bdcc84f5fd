"""The loop of one rank of a run: samples into its pipeline, evaluations between, records out."""
