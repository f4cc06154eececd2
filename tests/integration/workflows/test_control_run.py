"""A rollout with a control run: an admitted task, a solution that is confirmed, and a takeover that is rejected."""

import base64

import pytest
from sqlalchemy import select

from grading.oracle import name_digest
from store.schema import AdmissionTable, GradeTable, SandboxTable
from tests.integration.grading import shop
from tests.integration.workflows.conftest import Loop
from tests.integration.workflows.test_admission import run
from tests.integration.workflows.test_rollout import call, finish

pytestmark = pytest.mark.timeout(600)
SAME = "class Same(int):\n    def __eq__(self, other): return True\n    __hash__ = int.__hash__\n\n\n"
PATCHES = {
    "graded": shop.TOTAL + shop.FIX,
    "rejected": SAME + shop.TOTAL + "def discount(cents, percent):\n    return Same(cents)\n",
}


@pytest.mark.parametrize("outcome", PATCHES)
async def test_a_solved_verdict_is_checked(loop: Loop, tmp_path_factory: pytest.TempPathFactory, outcome: str) -> None:
    task = shop.task("eval_cmd", "")
    gold = shop.diff(tmp_path_factory.mktemp("gold"), {"shop/price.py": shop.TOTAL + shop.FIX}).decode()
    path = loop.dataset(**{**task.spec, "gold_patch": gold}, workdir=task.workdir)
    assert (await run(loop, "AdmitTasks", {"dataset": path, "repeats": 1}))["admitted"] == 1
    source = base64.b64encode(PATCHES[outcome].encode()).decode()
    await loop.script(call(f"echo {source} | base64 -d > shop/price.py"), "Done.")
    _, row = await finish(loop, await loop.start(path))
    async with loop.database.begin() as connection:
        grade = (await connection.execute(select(GradeTable).where(GradeTable.rollout_id == row.id))).one()
        boxes = select(SandboxTable.role, SandboxTable.state).where(SandboxTable.rollout_id == row.id)
        found = sorted((await connection.execute(boxes)).all())
        admission = (await connection.execute(select(AdmissionTable).order_by(AdmissionTable.id.desc()))).first()
    assert admission is not None and admission.evidence[-1]["patch"] == "control", "gold has passed the tests alone"
    assert sorted(admission.oracle["selected"]) == sorted(map(name_digest, shop.F2P))
    assert row.outcome == outcome and row.reward == float(outcome == "graded"), row.outcome_reason
    caught = [bool(one["passed"]) for one in grade.control]
    assert grade.has_oracle and caught == ([False] * (len(caught) - 1) + [outcome == "rejected"]), grade
    repeated = [one["solved"] for one in grade.control if one["broken_oracle"] is None]
    assert outcome == "rejected" or (len(caught) == 4 and repeated == [True, True]), grade.control
    assert (grade.rule, grade.solved) == (("control_run", False) if outcome == "rejected" else ("", True))
    assert [role for role, _ in found] == ["agent", *["grade"] * (1 + len(grade.control))] and {
        state for _, state in found
    } == {"released"}
