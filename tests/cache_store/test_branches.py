"""The segment tree as branches: every segment stands once, in the order in which a path is read."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from cache_store.branches import branches_of
from cache_store.records import Segment


def segment(name: str, parent: Segment | None, start: int, num_tokens: int = 10) -> Segment:
    parent_id = parent.id if parent else None
    return Segment(name, "ann", 1, parent_id, start, num_tokens, "stored", name, 1, "", 1.0, 0.0, 0.0)


def shape(segments: list[Segment]) -> list[tuple[int, int, str]]:
    """Of each branch its depth, its start, and the names in it."""
    return [
        (branch.depth, branch.start, "".join(segment.id for segment in branch.segments))
        for branch in branches_of(segments)
    ]


def test_a_long_chat_is_one_branch() -> None:
    chain = [segment("0", None, 0)]
    for number in range(1, 3_000):
        chain.append(segment(str(number), chain[-1], 10 * number))
    assert [(branch.depth, len(branch.segments)) for branch in branches_of(chain)] == [(0, 3_000)]


def test_a_fork_in_the_middle_or_at_the_end_is_a_branch_one_deeper() -> None:
    a = segment("a", None, 0)
    b, c = segment("b", a, 10), segment("c", a, 10)
    d, e = segment("d", b, 15), segment("e", b, 20)
    f = segment("f", d, 25)
    g = segment("g", a, 4)
    assert shape([a, g, b, c, d, e, f]) == [(0, 0, "abe"), (1, 4, "g"), (1, 10, "c"), (1, 15, "df")]


def test_what_hangs_from_something_else_begins_a_tree() -> None:
    a, b = segment("a", None, 0), segment("b", None, 0)
    c = segment("c", segment("not here", None, 0), 10)
    assert shape([a, b, c]) == [(0, 0, "a"), (0, 0, "b"), (0, 10, "c")]
    assert shape([]) == []


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 10)), max_size=30))
def test_every_segment_stands_in_one_branch_behind_what_it_needs(choices: list[tuple[int, int]]) -> None:
    segments = [segment("0", None, 0)]
    for number, (above, rows) in enumerate(choices, 1):
        parent = segments[above % len(segments)]
        segments.append(segment(str(number), parent, parent.start + rows))
    segments.sort(key=lambda each: each.start)
    branches = branches_of(segments)
    order = [each.id for branch in branches for each in branch.segments]
    assert sorted(order) == sorted(each.id for each in segments)
    assert all(
        each.parent_id is None or order.index(each.parent_id) < order.index(each.id) for each in segments
    )
    for branch in branches:
        for one, following in zip(branch.segments, branch.segments[1:], strict=False):
            assert (following.parent_id, following.start) == (one.id, one.end)
