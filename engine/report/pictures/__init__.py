"""Timelines and waterfalls as pictures."""
