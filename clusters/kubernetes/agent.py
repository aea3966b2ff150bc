"""torchrun for a Kubernetes pod: it exits with the status of the rank that failed first.

    python clusters/kubernetes/agent.py --standalone --nproc-per-node=2 ddp_basics/train.py

The options are torchrun's. torchrun itself always ends with 1 after a failure; but the
podFailurePolicy of a Job uses the status to decide whether to try again:

    2      the arguments are wrong: the next try would fail, too
    143    the ranks were asked to stop, have saved, and have ended with 143 by themselves
    137    a rank was killed: out of memory, or it hung and did not end in time after SIGTERM
    else   the status of the script
"""

import subprocess
import sys

from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler
from torch.distributed.run import main as torchrun

ranks = {}  # the process of each local rank: torchrun does not say how it ended after SIGTERM


class Rank(subprocess.Popen):
    def __init__(self, *args, env: dict[str, str], **more):
        super().__init__(*args, env=env, **more)
        ranks[env["LOCAL_RANK"]] = self  # after a restart it replaces the old process


def main() -> None:
    subprocess_handler.Popen = Rank
    try:
        torchrun()
    except ChildFailedError as error:
        print(error, file=sys.stderr)  # torchrun's table: which rank, when, its traceback
        _, first = error.get_first_failure()
        sys.exit(status_of(first.exitcode))
    except SignalException:  # this process was asked to end, and has ended its ranks
        statuses = {status_of(rank.poll()) for rank in ranks.values()}
        failed = statuses - {0, 143}
        sys.exit(max(failed or statuses, default=1))  # 1: the signal came before there were ranks


def status_of(exitcode: int) -> int:
    """The status as in a shell: 128 + 9 instead of Python's -9 for a process killed by signal 9.

    A rank killed by SIGTERM did not catch the signal, so it has not saved: 137, not 143.
    """
    if exitcode == -15:
        return 137
    return exitcode if exitcode >= 0 else 128 - exitcode


if __name__ == "__main__":
    main()
