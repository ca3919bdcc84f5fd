"""Channels and sums between the processes of one Linux host, through memory that both ends map."""

from engine.transport.shared.transport import SharedMemoryTransport, make

__all__ = ["SharedMemoryTransport", "make"]
