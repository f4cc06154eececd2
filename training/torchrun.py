"""The learner under torchrun, without Ray, for clusters that have their own launcher.

Run `torchrun --nproc-per-node=8 -m training.torchrun RUN` on every node that takes part. A dead rank ends the others;
torchrun's `--max-restarts` starts them again from the checkpoint.
"""

import argparse
import os
import sys
import traceback
from typing import NoReturn

import torch
import torch.distributed as dist

from ratchet import paths
from ratchet.logs import configure_logs
from training.rank_runtime import RankSettings
from training.train_loop import train_rank


def run_torchrun() -> NoReturn:
    """Join the process group that torchrun describes in the environment, run this rank, and end the process.

    It ends without Python's exit hooks: the client of a metric sink may wait in its own without limit.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("run_id")
    parser.add_argument("--threads", type=int, default=1, help="compute threads of each rank on a CPU")
    options = parser.parse_args()
    configure_logs("learner")
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    url = os.environ["RATCHET_DATABASE_URL"]
    settings = RankSettings(options.run_id, url, paths.policies(), paths.checkpoints(), options.threads, paths.home())
    status = 0
    try:
        train_rank(settings)
        dist.destroy_process_group()
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    run_torchrun()
