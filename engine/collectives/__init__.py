"""Collectives that sum gradients over replicas, by name.

ring     reduce-scatter and all-gather over point-to-point channels: our own, any dtype, bitwise reproducible
native   the backend's all-reduce
"""

from __future__ import annotations

from engine.collectives.base import SUMMABLE, Collective
from engine.collectives.native import Native
from engine.collectives.ring import Ring

COLLECTIVES: dict[str, type[Collective]] = {"ring": Ring, "native": Native}

__all__ = ["COLLECTIVES", "SUMMABLE", "Collective", "Native", "Ring"]
