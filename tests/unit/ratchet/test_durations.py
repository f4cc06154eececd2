"""Durations keep two units, so that a reader loses at most a sixtieth of them, and never jump back at a limit."""

from ratchet.durations import duration_in_words

_SECONDS = {"s": 1, "min": 60, "h": 3600, "d": 86_400}


def read(words: str) -> float:
    parts = words.split()
    return sum(float(number) * _SECONDS[unit] for number, unit in zip(parts[::2], parts[1::2], strict=True))


def test_a_duration_has_its_two_largest_units() -> None:
    found = {one: duration_in_words(one) for one in (-1, 0.04, 4.23, 9.96, 59.4, 59.6, 750, 3600, 11_100, 187_200)}
    assert list(found.values()) == [
        *("0.0 s", "0.0 s", "4.2 s", "10 s", "59 s", "1 min"),
        *("12 min 30 s", "1 h", "3 h 5 min", "2 d 4 h"),
    ]


def test_what_is_lost_is_small_at_every_size() -> None:
    seconds = 10.0
    while seconds < 400 * 86_400:
        assert abs(read(duration_in_words(seconds)) - seconds) <= max(0.5, seconds / 48), seconds
        seconds *= 1.0037
