"""The page of docs/notebook.ipynb: its text, its code, and the outputs that are stored in it."""

import json
from pathlib import Path
from typing import Any

NOTEBOOK = Path("docs/notebook.ipynb")
PAGE = Path("docs/notebook.md")

_ABOUT = """
The cells and outputs of [notebook.ipynb](notebook.ipynb), which a test executes; the outputs are of a `make train`.
"""


def notebook_page() -> str:
    """Return the page; raises KeyError if the file is no notebook of version 4."""
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    title, *parts = [part for cell in cells for part in _parts(cell)]
    heading, _, rest = title.partition("\n")
    return "\n\n".join([heading, _ABOUT.strip(), rest.strip(), *parts]) + "\n"


def _parts(cell: dict[str, Any]) -> list[str]:
    source = "".join(cell["source"]).strip()
    if cell["cell_type"] != "code":
        return [source]
    shown = ["".join(output["data"]["text/plain"]) for output in cell["outputs"] if "data" in output]
    return [f"```python\n{source}\n```", *(f"```text\n{text}\n```" for text in shown)]
