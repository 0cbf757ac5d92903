"""The segment tree as people read it: runs of segments, and where other runs fork off.

A long chat is a chain of hundreds of segments, so depth counts forks, not segments.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from cache_store.records import Segment


@dataclass(frozen=True, slots=True)
class Branch:
    """Segments each of which goes on where the one before ends. `depth`: how many forks lie above it."""

    depth: int
    segments: tuple[Segment, ...]

    @property
    def start(self) -> int:
        """How many tokens of the path lie before it."""
        return self.segments[0].start


def branches_of(segments: Iterable[Segment]) -> list[Branch]:
    """These segments, which come parents first, branch by branch. A branch goes on with the first child at
    the very end of its last segment; other children begin branches, which follow the one they fork from.
    A segment whose parent is not among them begins a tree of its own."""
    children: dict[str, list[Segment]] = {}
    waiting: list[tuple[int, Segment]] = []
    for segment in segments:
        if segment.parent_id in children:
            children[segment.parent_id].append(segment)
        else:
            waiting.append((0, segment))
        children[segment.id] = []
    waiting.reverse()
    branches: list[Branch] = []
    while waiting:
        depth, first = waiting.pop()
        run, forks = _run_from(first, children)
        branches.append(Branch(depth, tuple(run)))
        waiting += [(depth + 1, fork) for fork in reversed(forks)]
    return branches


def _run_from(first: Segment, children: dict[str, list[Segment]]) -> tuple[list[Segment], list[Segment]]:
    """The run that begins with this segment, and what forks off it, in the order of the path."""
    run, forks = [first], list[Segment]()
    while True:
        below = children[run[-1].id]
        following = next((child for child in below if child.start == run[-1].end), None)
        forks += [child for child in below if child is not following]
        if following is None:
            return run, forks
        run.append(following)
