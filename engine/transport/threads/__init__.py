"""Channels and sums between ranks that are threads of one process."""

from engine.transport.threads.hub import ThreadHub, ThreadTransport, make

__all__ = ["ThreadHub", "ThreadTransport", "make"]
