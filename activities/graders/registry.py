"""The graders by name.

Why here: datasets name them, stages look them up; adding one is a file and a line.
Called by: the worker, the datasets and the CLI.
"""

from activities.graders.base import Grader
from activities.graders.eval_cmd import EvalCmdGrader
from activities.graders.f2p_script import F2pScriptGrader
from activities.graders.swe_bench import SweBenchGrader
from activities.graders.swe_bench_pro import SweBenchProGrader

GRADERS: dict[str, Grader] = {
    grader.name: grader for grader in (EvalCmdGrader(), F2pScriptGrader(), SweBenchGrader(), SweBenchProGrader())
}
