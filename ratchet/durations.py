"""Durations as text for people."""


def duration_in_words(seconds: float) -> str:
    """Return a duration in its two largest units, such as 4.2 s, 42 s, 12 min 30 s, 3 h 5 min or 2 d 4 h."""
    if seconds < 9.95:
        return f"{max(0.0, seconds):.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return _two_units(whole, 60, "min", "s")
    minutes = round(seconds / 60)
    return _two_units(minutes, 60, "h", "min") if minutes < 24 * 60 else _two_units(round(minutes / 60), 24, "d", "h")


def _two_units(number: int, size: int, larger: str, smaller: str) -> str:
    whole, rest = divmod(number, size)
    return f"{whole} {larger}" + (f" {rest} {smaller}" if rest else "")
