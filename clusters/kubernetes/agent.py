"""torchrun for a pod, which ends with the exit status of the rank that failed first.

    python clusters/kubernetes/agent.py --standalone --nproc-per-node=2 ddp_basics/train.py

The options are torchrun's. torchrun ends with 1 whatever has happened; the podFailurePolicy of a
Job tells by the status whether another try makes sense:

    2      the arguments are wrong: the next try would fail, too
    143    the ranks were asked to stop and have saved: the next pod goes on from there
    137    a rank was killed, for want of memory perhaps
    else   whatever the script ended with
"""

import sys

from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import main as torchrun


def main() -> None:
    try:
        torchrun()
    except ChildFailedError as error:
        print(error, file=sys.stderr)  # torchrun's table: which rank, when, its traceback
        _, first = error.get_first_failure()
        sys.exit(as_a_shell_has_it(first.exitcode))
    except SignalException as error:  # this process was asked to end, and has ended its ranks
        sys.exit(128 + error.sigval)


def as_a_shell_has_it(exitcode: int) -> int:
    """Python says -9 of a process that signal 9 has killed, a shell 137."""
    return exitcode if exitcode >= 0 else 128 - exitcode


if __name__ == "__main__":
    main()
