"""Models and data sets: torch only, nothing of the engine.

A model is a function that returns its layers in order, each as (dotted name, function that builds it); the model is
their plain sequential composition. So a worker can build only the layers of its own stages.
"""
