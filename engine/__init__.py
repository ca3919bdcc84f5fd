"""A pipeline-parallel training engine: schedules as data, proven before they run, measured while they run."""

__version__ = "0.1.0"
