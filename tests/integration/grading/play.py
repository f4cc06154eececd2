"""Play a file of attacks and print what each one got: `python -m tests.integration.grading.play FILE [NAME …]`.

FILE is a Python file with a tuple `UNLISTED` of `UnlistedAttack`.
"""

import asyncio
import runpy
import shutil
import sys
import tempfile
from collections import Counter
from pathlib import Path

from grading.judge_patch import GradingLimits
from tests.integration.boxes import boxes_of
from tests.integration.grading.ecosystems import ECOSYSTEMS, Referee, make_referee, patch_of
from tests.private_gateway import private_gateway

EVAL_SECONDS = 60.0


async def play_file(path: str, names: list[str]) -> None:
    attacks = [one for one in runpy.run_path(path)["UNLISTED"] if not names or one.name in names]
    directory = Path(tempfile.mkdtemp(prefix="ratchet-play-"))
    directory.chmod(0o755)
    counts: Counter[str] = Counter()
    try:
        with private_gateway(directory / "boxes", max_boxes=4) as provider:
            referees: dict[str, Referee] = {}
            for number, attack in enumerate(attacks):
                ecosystem = ECOSYSTEMS[attack.ecosystem]
                if attack.ecosystem not in referees:
                    limits = GradingLimits(eval_seconds=EVAL_SECONDS, workspace_seconds=120)
                    referees[attack.ecosystem] = await make_referee(
                        ecosystem, boxes_of(provider), directory / f"gold-{attack.ecosystem}", limits
                    )
                patch = patch_of(ecosystem, attack.edits, directory / str(number), attack.executable)
                played = await referees[attack.ecosystem].play(boxes_of(provider), patch, number)
                counts[played.result] += 1
                print(f"{played.result:10} {attack.ecosystem:6} [{attack.kind}] {attack.name}", flush=True)
                print(f"           {played.rule} {played.reason[:200]}", flush=True)
                if played.result in ("solved", "no verdict"):
                    print(f"           findings {played.findings} flags {played.flags}", flush=True)
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    print(dict(counts))


if __name__ == "__main__":
    asyncio.run(play_file(sys.argv[1], sys.argv[2:]))
