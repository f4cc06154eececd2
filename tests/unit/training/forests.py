"""Prefix trees for tests, drawn by the lengths and depths of their segments."""

from training.prefix_tree import Segment


def forest(shape: list[tuple[int, int]]) -> list[Segment]:
    """Make a forest from (length, depth) of its segments, depth-first. A depth that is too great becomes a child's."""
    path: list[int] = []
    drawn: list[tuple[int, int, int, int]] = []
    start = 0
    for number, (length, depth) in enumerate(shape):
        path = path[:depth]
        parent = path[-1] if path else -1
        drawn.append(
            (start, start + length, drawn[parent][2] + drawn[parent][1] - drawn[parent][0] if path else 0, parent)
        )
        path.append(number)
        start += length
    ends = [end for _, end, _, _ in drawn]
    for number in range(len(drawn) - 1, -1, -1):
        if drawn[number][3] >= 0:
            ends[drawn[number][3]] = max(ends[drawn[number][3]], ends[number])
    return [Segment(first, end, ends[n], position, parent) for n, (first, end, position, parent) in enumerate(drawn)]
