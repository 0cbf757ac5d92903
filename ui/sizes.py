"""Sizes in words. Units are powers of 1,024, as on the command line."""

from __future__ import annotations

_UNITS = ("KB", "MB", "GB", "TB")


def size_text(num_bytes: int) -> str:
    """`312 MB`, `1.5 GB`, `1 byte`: two or three figures, and no false precision."""
    if num_bytes < 1000:
        return "1 byte" if num_bytes == 1 else f"{num_bytes} bytes"
    value, unit = num_bytes / 1024, 0
    while value >= 999.5 and unit < len(_UNITS) - 1:
        value, unit = value / 1024, unit + 1
    figures = f"{value:.1f}".removesuffix(".0") if value < 9.95 else f"{value:,.0f}"
    return f"{figures} {_UNITS[unit]}"
