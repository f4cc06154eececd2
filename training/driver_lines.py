"""The lines that the driver of a run and its ranks print, for a log of JSON objects.

Ray forwards the lines of the ranks to the driver, each behind the name of its process. In a log of JSON objects that
name is removed from the lines of our own logger, and any other line becomes an object of its own.
"""

import re
from asyncio import StreamReader

import structlog

from ratchet.logs import json_object

MAX_LINE_BYTES = 1 << 20
"""A longer line is left out."""
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_PROCESS = re.compile(r"^\((\w+ pid=\d+(?:, ip=[^)\s]+)?)\) ")


async def relay_lines(stream: StreamReader, run_id: str) -> None:
    """Print every line of the stream as one JSON object, until it ends."""
    log = structlog.get_logger()
    while True:
        try:
            raw = await stream.readline()
        except ValueError:  # over the limit; what is left of it is read as the next line
            continue
        if not raw:
            return
        text = _COLOURS.sub("", raw.decode(errors="replace")).rstrip()
        if not text:
            continue
        found = _PROCESS.match(text)
        line = text[found.end() :] if found else text
        try:
            if json_object(line) is not None:
                print(line, flush=True)
            else:
                log.info(line, run_id=run_id, process=found[1] if found else "driver")
        except (OSError, UnicodeError):  # a line that cannot be written must not stop the driver, which waits for us
            continue
