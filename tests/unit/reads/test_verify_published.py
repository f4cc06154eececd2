"""A publication with one wrong row is found by the check whose claim it breaks, and by no other."""

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from reads.verify_published import CHECKS, curves, main

Tables = dict[str, list[dict[str, Any]]]
ONCE, ORIGIN, VERDICT = CHECKS


def publication() -> Tables:
    """A run of one group of two: a solved rollout of three tokens and one of two, trained in step 1."""
    rollouts, turns, trained, spans, grades, members = [], [], [], [], [], []
    for number, (reward, length) in enumerate([(1.0, 3), (0.0, 2)], start=1):
        rollouts.append(
            {
                "id": number,
                "run_id": "r",
                "group_id": 1,
                "task_id": 1,
                "reward": reward,
                "grade_id": number,
                "replaced_by": None,
            }
        )
        span = [{"version": "r@0", "start": 0, "end": length}]
        values = bytes(4 * length)
        turns.append(
            {"id": number, "num_sampled": length, "version_spans": json.dumps(span), "sampled_ids": values}
            | {"logprobs": values, "logprobs_valid": True}
        )
        ratios = struct.pack(f"<{length}e", *[0.0] * length)
        trained.append({"run_id": "r", "step": 1, "turn_id": number, "rollout_id": number, "log_ratios": ratios})
        spans.append({"turn_id": number, "trained": True, "source_start": 0, "length": length})
        grades.append({"id": number, "rollout_id": number, "solved": bool(reward), "rejected": False, "rewards": None})
        members.append({"rollout_id": number, "grade_id": number, "reward": reward, "num_tokens": length})
    evaluated = [
        {
            "id": 10 + number,
            "run_id": "r",
            "group_id": 2 + number,
            "task_id": 5,
            "reward": float(number),
            "grade_id": None,
        }
        | {"replaced_by": None}
        for number in range(2)
    ]
    groups = [{"id": 1, "run_id": "r", "purpose": "train", "label": ""}]
    groups += [{"id": 2 + number, "run_id": "r", "purpose": "eval", "label": str(number)} for number in range(2)]
    return {
        "run": [{"run_id": "r", "config": json.dumps({"grading": {"reward": "solved"}})}],
        "rollout": rollouts + evaluated,
        "rollout_group": groups,
        "grade": grades,
        "turn": turns,
        "trained_turn": trained,
        "chain_span": spans,
        "policy_version": [{"version": "r@0"}],
        "batch": [{"run_id": "r", "step": 1, "state": "committed", "members": json.dumps(members)}],
        "evaluation": [{"run_id": "r", "label": str(n), "step": n, "temperature": 1.0} for n in range(2)],
    }


def write(tables: Tables, folder: Path) -> Path:
    (folder / "tables").mkdir()
    for name, rows in tables.items():
        pq.write_table(pa.Table.from_pylist(rows), folder / "tables" / f"{name}.parquet")
    return folder


def faults(folder: Path) -> dict[str, list[str]]:
    return {title: found for title, check in CHECKS.items() if (found := list(check(folder)))}


def change_member(tables: Tables, **values: Any) -> None:
    (batch,) = tables["batch"]
    batch["members"] = json.dumps([one | values for one in json.loads(batch["members"])])


def repeat_step(tables: Tables) -> None:
    tables["batch"].append(tables["batch"][0] | {"step": 2, "state": "planned"})


def train_half_twice(tables: Tables) -> None:
    tables["chain_span"].append(tables["chain_span"][0] | {"source_start": 2, "length": 1})


def lose_a_logprob(tables: Tables) -> None:
    tables["turn"][0]["logprobs"] = bytes(8)


def shorten_versions(tables: Tables) -> None:
    tables["turn"][0]["version_spans"] = json.dumps([{"version": "r@0", "start": 0, "end": 2}])


def lose_weights(tables: Tables) -> None:
    tables["policy_version"][0]["version"] = "r@7"


def lose_a_turn(tables: Tables) -> None:
    del tables["turn"][0]


def leave_a_token_out(tables: Tables) -> None:
    tables["trained_turn"][0]["log_ratios"] = struct.pack("<3e", 0.0, float("nan"), 0.0)


def swap_grades(tables: Tables) -> None:
    tables["grade"][0]["rollout_id"] = 2


def raise_rewards(tables: Tables) -> None:
    change_member(tables, reward=1.0)


def raise_rewards_everywhere(tables: Tables) -> None:
    raise_rewards(tables)
    tables["rollout"][1]["reward"] = 1.0


def reject(tables: Tables) -> None:
    tables["grade"][0]["rejected"] = True


@pytest.mark.parametrize(
    ("damage", "broken"),
    [
        (repeat_step, ONCE),
        (train_half_twice, ONCE),
        (lose_a_logprob, ORIGIN),
        (shorten_versions, ORIGIN),
        (lose_weights, ORIGIN),
        (lose_a_turn, ORIGIN),
        (leave_a_token_out, ORIGIN),
        (swap_grades, VERDICT),
        (raise_rewards, VERDICT),
        (raise_rewards_everywhere, VERDICT),
        (reject, VERDICT),
    ],
)
def test_a_wrong_row_is_found(damage: Callable[[Tables], None], broken: str, tmp_path: Path) -> None:
    tables = publication()
    damage(tables)
    assert list(faults(write(tables, tmp_path))) == [broken]
    assert main(tmp_path) == 1


def test_a_right_publication_gives_its_curve(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write(publication(), tmp_path)
    assert faults(folder) == {} and main(folder) == 0
    assert "FAILED" not in capsys.readouterr().out
    assert list(curves(folder)) == [
        "r@0 at temperature 1: +0.000 [+0.000, +0.000] over 1 tasks",
        "r@1 at temperature 1: +1.000 [+1.000, +1.000] over 1 tasks",
        "r: last minus first at temperature 1: +1.000 [+1.000, +1.000] over 1 tasks",
    ]
