"""The graders by name. To add one, write its file and name it here."""

from grading.base import Grader
from grading.eval_cmd import EvalCmdGrader
from grading.f2p_script import F2pScriptGrader
from grading.swe_bench import SweBenchGrader
from grading.swe_bench_pro import SweBenchProGrader

GRADERS: dict[str, Grader] = {
    grader.name: grader for grader in (EvalCmdGrader(), F2pScriptGrader(), SweBenchGrader(), SweBenchProGrader())
}
