"""Let rank 0 do slow work alone: the other ranks poll the store, so no collective times out."""

import threading
import time
from collections.abc import Callable
from itertools import count

import torch.distributed as dist
from arguments import UserError
from runtime import Worker

numbers = count()  # of the calls; all ranks make the same calls


def on_rank_0(action: Callable[[], object], worker: Worker, doing: str) -> object:
    """All ranks call this. Rank 0 runs `action`, and all ranks return its result.

    If `action` raises a `UserError`, all ranks raise it. A collective would give up after --timeout
    while rank 0 still works, so the other ranks poll the store. (If rank 0 dies, the launcher ends
    the job.)
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
