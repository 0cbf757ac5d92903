"""Layers of fixed capacity: allocated whole with the first states, never moved, never larger.

They hold what a growing layer holds, byte for byte, and attention sees the valid rows only, so no mask has to
cover the rest. Whoever would need more room is told before anything is allocated.
"""

from __future__ import annotations

from chat.errors import MemoryLimit
from chat.layers.contract import RowLayer
from chat.layers.growing import GrowingHybridLayer, GrowingLayer
from chat.layers.offloaded import OffloadedHybridLayer, OffloadedLayer


class FixedCapacity(RowLayer):
    """Makes a layer's first growth step its last; comes first among the bases."""

    def capacity_for(self, num_tokens: int) -> int:
        """Always the same. Raises MemoryLimit when it is not enough."""
        if num_tokens > self.growth_step:
            raise MemoryLimit(
                f"This chat needs room for {num_tokens:,} tokens, but its cache of fixed size has room for"
                f" {self.growth_step:,}; your text is kept: choose another kind of cache in the drawer, or"
                " start with a larger --static-tokens."
            )
        return self.growth_step


class StaticLayer(FixedCapacity, GrowingLayer):
    """On the device."""


class StaticHybridLayer(FixedCapacity, GrowingHybridLayer):
    """On the device, next to a recurrent state."""


class OffloadedStaticLayer(FixedCapacity, OffloadedLayer):
    """In the computer's memory."""


class OffloadedStaticHybridLayer(FixedCapacity, OffloadedHybridLayer):
    """In the computer's memory, next to a recurrent state."""
