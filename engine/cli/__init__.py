"""Command line: compose and check Settings with Hydra, run each job or plan, return exit codes."""
