"""Words of the command line to Settings, and each job to its outcome. Only this room sees Hydra."""
