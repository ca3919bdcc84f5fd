"""How replicas train together: which reduction, a divided optimizer, asynchronous updates."""
