"""What rank 0 does alone takes as long as it takes: the others wait in no collective."""

import threading
import time
from collections.abc import Callable
from itertools import count

import torch.distributed as dist
from arguments import UserError
from runtime import Worker

numbers = count()  # all ranks count their calls alike


def on_rank_0(action: Callable[[], object], worker: Worker, doing: str) -> object:
    """All ranks call this. Rank 0 runs `action`; all return its result, or raise its `UserError`.

    A rank that waited in a collective would give up after --timeout, however busy rank 0 is. It
    looks into the store instead. (If rank 0 dies, the launcher ends the job.)
    doing: what rank 0 prints after ten seconds, as in "writing step_00000100.pt".
    The result should be small: it is pickled and sent.
    """
    if worker.world_size == 1:
        return action()
    done = f"rank 0 has done {next(numbers)}"
    result = None
    if worker.is_main:
        timer = threading.Timer(10, lambda: print(f"rank 0 is {doing} ...", flush=True))
        timer.start()
        try:
            result = action()
        except UserError as error:
            result = error
        finally:
            timer.cancel()
        worker.store.set(done, "")
    pause = 0.001
    while not worker.store.check([done]):
        time.sleep(pause)
        pause = min(2 * pause, 0.2)
    box = [result]
    dist.broadcast_object_list(box, src=0)
    if isinstance(box[0], UserError):
        raise box[0]
    return box[0]
