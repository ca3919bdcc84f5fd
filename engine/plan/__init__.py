"""Schedules as data, and pure: actions, lowering, proof, simulation, partition. Neither torch nor Hydra."""
