"""The graders by name. To add one, write its file and name it here."""

from activities.graders.base import Grader
from activities.graders.eval_cmd import EvalCmdGrader
from activities.graders.f2p_script import F2pScriptGrader
from activities.graders.swe_bench import SweBenchGrader
from activities.graders.swe_bench_pro import SweBenchProGrader

GRADERS: dict[str, Grader] = {
    grader.name: grader for grader in (EvalCmdGrader(), F2pScriptGrader(), SweBenchGrader(), SweBenchProGrader())
}
