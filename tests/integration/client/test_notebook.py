"""The notebook of docs/ runs from its first cell to its last, over a store with a run of every kind of outcome."""

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from store.database import Database
from tests.integration.viewer.filled_store import fill_run

ROOT = Path(__file__).resolve().parents[3]


async def test_every_cell_runs(
    database: Database, run_id: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await fill_run(database, run_id, model)
    monkeypatch.setenv("RATCHET_DATABASE_URL", database.url)
    monkeypatch.setenv("RATCHET_HOME", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    notebook = nbformat.read(ROOT / "docs" / "notebook.ipynb", as_version=4)
    await NotebookClient(
        notebook, timeout=120, kernel_name="python3", resources={"metadata": {"path": str(ROOT)}}
    ).async_execute()
    outputs = [cell.outputs for cell in notebook.cells if cell.cell_type == "code"]
    shown = [output["data"]["text/plain"] for found in outputs for output in found if "data" in output]
    assert len(shown) >= len(outputs) - 1 and run_id in shown[0]
