"""What kinds of cache are called before people."""

from __future__ import annotations

from collections.abc import Mapping

from chat.settings import CacheKind

KIND_NAMES: Mapping[str, str] = {
    "dynamic": "full precision",
    "native8": "8 bit",
    "native4": "4 bit",
    "fp8": "8-bit floating point",
    "hqq8": "8 bit by hqq",
    "hqq4": "4 bit by hqq",
    "hqq2": "2 bit by hqq",
    "quanto4": "4 bit by quanto",
    "quanto2": "2 bit by quanto",
    "offloaded": "full precision in the computer's memory",
    "static": "full precision of a fixed size",
    "offloaded_static": "full precision of a fixed size in the computer's memory",
}


def name_of(kind: CacheKind) -> str:
    """In the middle of a sentence; the option's word where there is none."""
    return KIND_NAMES.get(kind, kind)
