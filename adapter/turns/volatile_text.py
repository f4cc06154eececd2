"""Parts of texts that differ each time although the same was done: dates, durations, process ids, temporary names.

A command that a replayed agent runs again writes them anew. The model is shown the text that it was shown before.
"""

import re

_MONTH = "(?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)"
_CLOCK = r"\d{1,2}:\d\d(?::\d\d(?:[.,]\d+)?)?"
_SHORT_HASH = r"(?=\d*[a-f])(?=[a-f]*\d)[0-9a-f]{7,12}"
_VOLATILE = re.compile(
    "|".join(
        (
            rf"\b\d{{4}}-\d\d-\d\d(?:[T ]{_CLOCK}(?: ?(?:Z|UTC|[+-]\d\d:?\d\d))?)?",
            rf"(?:\b(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun),? )?\b{_MONTH} {{1,2}}\d{{1,2}},?(?: +\d{{4}})?(?: +{_CLOCK})?"
            r"(?:(?<=\d:\d\d:\d\d)(?: (?:UTC|[AP]M))* \d{4})?(?: [+-]\d{4})?\b",
            r"\b\d\d:\d\d:\d\d(?:[.,]\d+)?\b",
            r"(?<=\bin )\d+ ?(?:ns|us|ms|s|secs?|seconds?)\b|\b(?:\d+m)?\d+[.,]\d+ ?(?:ns|us|ms|s|secs?|seconds?)\b",
            r"(?<=/)tmp(?:\.[A-Za-z0-9]{6,12}|[a-z0-9_]{8})\b",
            r"\bpytest-\d+\b",
            r"(?<=\bpid )\d+|(?<=\bPID )\d+|(?<=\bpid=)\d+|^\[\d{1,2}\] \d{3,7}$",
            r"(?<=\bcommit )[0-9a-f]{7,40}\b|(?<=\bHEAD is now at )[0-9a-f]{7,40}\b",
            rf"(?<= ){_SHORT_HASH}(?=\] )|^{_SHORT_HASH}(?= )",
            r"(?<=\bat )0x[0-9a-f]{6,16}\b",
            r"(?<=\blocalhost:)\d+|(?<=\b127\.0\.0\.1:)\d+",
        )
    ),
    re.MULTILINE,
)


def without_volatile(text: str) -> str:
    """Return the text with a mark for each volatile part, so that texts that differ only in them become equal."""
    return _VOLATILE.sub("\0", text)
