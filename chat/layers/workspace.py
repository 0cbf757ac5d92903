"""Where packed rows become full precision again, for as long as one layer's attention looks at them.

Attention reads what `update` returned before the next layer's `update` is called, so all layers can unpack
into the same memory: a fresh allocation per layer and token would cost more than the unpacking. Only models
in which a later layer reads an earlier one's keys need memory of their own for every layer.

The memory is one layer's dense rows for the longest chat that was unpacked; it counts as working memory of
the model, like activations, not as part of any cache.
"""

from __future__ import annotations

from torch import Tensor

SPARE = 8
"""Room for an eighth more tokens than asked for, so that a growing chat moves on rarely."""
STEP = 256


class Workspace:
    """See the module. For one thread. `shared` False gives out fresh memory every time."""

    def __init__(self, *, shared: bool) -> None:
        self._shared = shared
        self._memory: dict[tuple[object, ...], Tensor] = {}

    def take(self, side: str, like: Tensor, num_tokens: int) -> Tensor:
        """Uninitialized rows `[1, kv_heads, num_tokens, width]`, typed and shaped like the states `like`;
        valid until the next call for the same `side`."""
        heads, width = like.shape[1], like.shape[3]
        if not self._shared:
            return like.new_empty(1, heads, num_tokens, width)
        key = (side, heads, width, like.dtype, like.device)
        memory = self._memory.get(key)
        if memory is None or memory.shape[2] < num_tokens:
            self._memory.pop(key, None)  # freed before its successor is allocated
            del memory
            room = -(-(num_tokens + num_tokens // SPARE) // STEP) * STEP
            memory = self._memory[key] = like.new_empty(1, heads, room, width)
        return memory[:, :, :num_tokens]
