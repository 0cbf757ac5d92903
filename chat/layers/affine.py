"""Rows of whole numbers on a straight scale: what all quantized kinds but fp8 are made of.

The elements of a row are cut into groups; each keeps the values of its lowest and highest code in half
precision, and every element becomes one of `2 ** bits` steps between them. Where a row's width is no multiple
of the group size, the groups are made a little smaller and the last one takes what is left.

With `rotated`, rows are multiplied by a Hadamard matrix before, and back after unpacking: it spreads a few
large elements over all of them, so that they no longer stretch the scale of their neighbours. The rotation
of a row is a fixed sequence of additions, so that it does not depend on what else is rotated with it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache

import torch
from torch import Tensor

from chat.layers.workspace import Workspace

TINY = 1e-30
"""Smaller than any step that half precision can tell; divides where a group's elements are all equal."""
LARGEST = 65504.0
"""Of half precision."""
SHRINKS = (1.0, 0.92, 0.84)
"""With few levels, giving up a little at the ends of a scale for finer steps often costs less in all."""

Fit = Callable[[Tensor, int], tuple[Tensor, Tensor, Tensor]]
"""Groups `[n, size]` in float32 and the number of bits → their codes, whole numbers from 0, and the values
`[n, 1]` of the lowest and the highest code. No group may depend on another."""


def between_extremes(groups: Tensor, bits: int) -> tuple[Tensor, Tensor, Tensor]:
    """The scale that just spans each group; see `Fit`."""
    low, high = _as_kept(groups.amin(-1, keepdim=True)), _as_kept(groups.amax(-1, keepdim=True))
    return _codes(groups, low, high, bits), low, high


def least_error(groups: Tensor, bits: int) -> tuple[Tensor, Tensor, Tensor]:
    """Of the scale that just spans each group and some shorter ones the one with the least squared error;
    see `Fit`."""
    low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    middle, half = (low + high) / 2, (high - low) / 2
    shrinks = groups.new_tensor(SHRINKS).view(-1, 1, 1)
    lows, highs = _as_kept(middle - half * shrinks), _as_kept(middle + half * shrinks)
    codes = _codes(groups, lows, highs, bits)
    error = (codes * ((highs - lows) / (2**bits - 1)) + lows - groups).square_().sum(-1, keepdim=True)
    best = error.argmin(0, keepdim=True)
    chosen = codes.gather(0, best.expand(1, *groups.shape))[0]
    return chosen, lows.gather(0, best)[0], highs.gather(0, best)[0]


class AffineCodec:
    """See the module. A `RowCodec`."""

    def __init__(self, bits: int, group_size: int, fit: Fit, *, rotated: bool = False) -> None:
        self._bits = bits
        self._group_size = group_size
        self._fit = fit
        self._rotated = rotated

    def parts(self, width: int) -> dict[str, tuple[torch.dtype, int]]:
        """Codes, and the ends of each group's scale."""
        num_groups, _ = self._cut(width)
        return {
            "codes": (torch.uint8, -(-width // (8 // self._bits))),
            "low": (torch.float16, num_groups),
            "high": (torch.float16, num_groups),
        }

    def pack(self, rows: Tensor) -> dict[str, Tensor]:
        """See `RowCodec`."""
        heads, num_tokens, width = rows.shape
        num_groups, size = self._cut(width)
        rows = rotate(rows.float()) if self._rotated else rows.float()
        if num_groups * size > width:  # the last element once more changes no extreme
            rows = torch.cat((rows, rows[..., -1:].expand(-1, -1, num_groups * size - width)), -1)
        codes, low, high = self._fit(rows.reshape(-1, size), self._bits)
        codes = codes.to(torch.uint8).view(heads, num_tokens, num_groups * size)[..., :width]
        return {
            "codes": pack_bits(codes, self._bits),
            "low": low.to(torch.float16).view(heads, num_tokens, num_groups),
            "high": high.to(torch.float16).view(heads, num_tokens, num_groups),
        }

    def unpack(self, parts: Mapping[str, Tensor], out: Tensor, workspace: Workspace) -> None:
        """See `RowCodec`."""
        rows = workspace.take("rotated", out[None], out.shape[1])[0] if self._rotated else out
        unpack_bits(parts["codes"], self._bits, rows)
        low = parts["low"].float()
        step = (parts["high"].float() - low) / (2**self._bits - 1)
        heads, num_tokens, width = out.shape
        num_groups, size = self._cut(width)
        if num_groups * size == width:
            grouped = rows.view(heads, num_tokens, num_groups, size)
            grouped.mul_(step[..., None]).add_(low[..., None])
        else:
            rows.mul_(step.repeat_interleave(size, -1)[..., :width])
            rows.add_(low.repeat_interleave(size, -1)[..., :width])
        if self._rotated:
            rotate_back(rows, out)

    def _cut(self, width: int) -> tuple[int, int]:
        """Into how many groups a row is cut, and of how many elements."""
        num_groups = -(-width // self._group_size)
        return num_groups, -(-width // num_groups)


def pack_bits(codes: Tensor, bits: int) -> Tensor:
    """Codes `[…, width]` of 8, 4 or 2 bits into bytes `[…, ceil(width / (8 / bits))]`: byte i of n holds
    elements i, i + n, …, so that unpacking writes runs."""
    width, per_byte = codes.shape[-1], 8 // bits
    num_bytes = -(-width // per_byte)
    packed = codes[..., :num_bytes]
    for number in range(1, per_byte):
        run = codes[..., number * num_bytes : (number + 1) * num_bytes] << (bits * number)
        if run.shape[-1] < num_bytes:
            run = torch.nn.functional.pad(run, (0, num_bytes - run.shape[-1]))
        packed = packed | run
    return packed


def unpack_bits(packed: Tensor, bits: int, out: Tensor) -> None:
    """The inverse of `pack_bits`, into `out` `[…, width]` of any type."""
    num_bytes, per_byte = packed.shape[-1], 8 // bits
    for number in range(per_byte):
        run = out[..., number * num_bytes : (number + 1) * num_bytes]
        codes = packed[..., : run.shape[-1]]
        if number:
            codes = codes >> (bits * number)
        run.copy_(codes & (2**bits - 1) if number + 1 < per_byte else codes)


def rotate(rows: Tensor) -> Tensor:
    """Rows `[…, width]` times a Hadamard matrix, block by block: a block is the largest power of two that
    divides the width. Orthogonal; `rotate_back` is its inverse."""
    size = block = _block(rows.shape[-1])
    blocks = rows.reshape(-1, block)
    while size > 1:
        even, odd = blocks[:, 0::2], blocks[:, 1::2]
        blocks = torch.cat((even + odd, even - odd), 1)
        size //= 2
    return (blocks * block**-0.5).view(rows.shape)


def rotate_back(rows: Tensor, out: Tensor) -> None:
    """Into `out`: what `rotate` made `rows` `[kv_heads, n, width]` from, up to rounding."""
    heads, num_tokens, width = rows.shape
    block = _block(width)
    shape = heads, num_tokens * (width // block), block
    matrix = _back_matrix(block, rows.dtype, rows.device).expand(heads, block, block)
    torch.bmm(rows.view(shape), matrix, out=out.view(shape))


@lru_cache(8)
def _back_matrix(block: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    with torch.inference_mode(False):  # it outlives the pass that asks for it first
        return rotate(torch.eye(block)).T.contiguous().to(device=device, dtype=dtype)


def _block(width: int) -> int:
    return width & -width


def _as_kept(ends: Tensor) -> Tensor:
    """Rounded as they will be kept, so that the codes fit what is read again."""
    return ends.clamp(-LARGEST, LARGEST).to(torch.float16).float()


def _codes(groups: Tensor, low: Tensor, high: Tensor, bits: int) -> Tensor:
    levels = 2**bits - 1
    return ((groups - low) * (levels / (high - low).clamp_(min=TINY))).round_().clamp_(0, levels)
