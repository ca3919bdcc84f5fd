"""From the records of single ranks to whole steps and evaluations: put together, on one clock, pushes counted."""
