"""All-reduce algorithms over point-to-point, one to a file, and what each costs."""
