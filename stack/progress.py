"""The type of the functions that receive progress lines, so that no part of `stack/` depends on the terminal."""

from collections.abc import Callable

ReportProgress = Callable[[str], None]
"""Receives one line of progress for a person; it returns at once and raises nothing."""
