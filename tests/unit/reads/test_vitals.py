"""Sparklines."""

from reads.vitals import sparkline


def test_a_sparkline_goes_from_the_lowest_to_the_highest_of_the_newest_values() -> None:
    assert sparkline([0.0, 0.5, 1.0, 0.25]) == "▁▅█▃"
    assert sparkline([-3.0] * 30 + [0.0, 1.0]) == "▁" * 18 + "▆█"
    assert sparkline([0.5, 0.5]) == "▁▁" and sparkline([0.5]) == sparkline([]) == ""
