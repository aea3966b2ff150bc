"""Object collectives (all_gather_object, ...): what they send, what they cost, their danger.

    torchrun --standalone --nproc_per_node=2 collectives/object_collectives.py
    torchrun --standalone --nproc_per_node=4 collectives/object_collectives.py --repeats 50
    python collectives/object_collectives.py                  # a world of one

1. They send any object that pickle can write: broadcast_object_list, scatter_object_list,
   gather_object, all_gather_object, send_object_list, recv_object_list.
2. The cost: pickle turns an object into bytes. One collective sends their number, the next one the
   bytes, padded to the longest object of all ranks. Look at the collectives and bytes per call, and
   at the time. (A GPU tensor arrives on the *sender's* GPU number: send x.cpu().)
3. The danger: unpickling runs code that the *sender* chose. Here it only sets an environment
   variable in the receiver, and the object that arrives looks innocent. Any process that can
   connect to your job can do that. The last table shows the safe way: JSON and tensors are only
   data.
"""

import io
import json
import os
import pickle
import statistics
from collections.abc import Callable

import torch
import torch.distributed as dist
from arguments import DEVICE_HELP, DEVICES, ArgumentParser, at_least
from costs import time_calls
from runtime import Worker, distributed_worker
from tables import print_by_rank, print_table
from torch.distributed.elastic.multiprocessing.errors import record
from torch.utils._python_dispatch import TorchDispatchMode  # has no public name


@record
def main() -> None:
    args = parse_args()
    with distributed_worker(args.device) as worker:
        show_objects(worker)
        show_cost(args, worker)
        show_danger(worker)


# 1. What can be sent.


def show_objects(worker: Worker) -> None:
    rank, world_size = worker.rank, worker.world_size
    mine = {"rank": rank, "loss": 0.5 * rank}

    settings = [{"lr": 0.1}, "digits"] if rank == 0 else [None, None]  # two items, like rank 0's
    dist.broadcast_object_list(settings, group_src=0)

    parts = [("shard", r) for r in range(world_size)] if rank == 0 else None
    part = [None]
    dist.scatter_object_list(part, parts, group_src=0)

    gathered = [None] * world_size if rank == 0 else None
    dist.gather_object(mine, gathered, group_dst=0)

    everyone = [None] * world_size
    dist.all_gather_object(everyone, mine)

    print_by_rank(
        worker,
        "1. Objects",
        broadcast_object_list=settings,
        scatter_object_list=part[0],
        gather_object="-" if gathered is None else f"{len(gathered)} objects",
        all_gather_object=[one["loss"] for one in everyone],
    )
    if world_size > 1:  # from one rank to another, like send and recv
        message = [{"from": rank}] if rank == 0 else [None]
        if rank == 0:
            dist.send_object_list(message, dst=world_size - 1)
        elif rank == world_size - 1:
            dist.recv_object_list(message, src=0)
        print_by_rank(worker, "send_object_list from rank 0 to the last", message=message[0])


# 2. What it costs.


class CountCollectives(TorchDispatchMode):
    """Counts, inside a `with` block, the collectives called and the bytes of their outputs."""

    calls = bytes = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "c10d":
            self.calls += 1
            self.bytes += sum(t.nbytes for t in flatten(args[0]))
        return function(*args, **(kwargs or {}))


def flatten(nested) -> list[torch.Tensor]:
    if isinstance(nested, torch.Tensor):
        return [nested]
    return [tensor for part in nested for tensor in flatten(part)]


def as_tensor(x: torch.Tensor) -> list[torch.Tensor]:
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, x)
    return parts


def as_object(x) -> list:
    parts = [None] * dist.get_world_size()
    dist.all_gather_object(parts, x)
    return parts


def cost(call: Callable, repeats: int, device: torch.device) -> tuple[int, int, float]:
    """Collectives per call, bytes that this rank receives per call, median milliseconds."""
    with CountCollectives() as count:
        call()
    seconds = time_calls(call, repeats, 1, device)
    return count.calls, count.bytes, 1000 * statistics.median(seconds)


def show_cost(args, worker: Worker) -> None:
    rows = []
    for count in (1, 1_000, 1_000_000):
        x = torch.randn(count, device=worker.device)
        tensor = cost(lambda x=x: as_tensor(x), args.repeats, worker.device)
        thing = cost(lambda x=x: as_object(x.cpu()), args.repeats, worker.device)
        for way, (calls, size, ms) in (("tensor", tensor), ("object", thing)):
            what, ratio = f"{count:,} x float32", f"{ms / tensor[2]:.1f}"
            rows.append([what, way, calls, f"{size:,}", f"{ms:.2f}", ratio])
    # All objects are padded to the longest one: one long message makes every message long.
    text = "x" * (1_000_000 if worker.is_main else 1)
    calls, size, ms = cost(lambda: as_object(text), args.repeats, worker.device)
    rows.append(["text: 1 MB on rank 0, or 1 B", "object", calls, f"{size:,}", f"{ms:.2f}", ""])
    if worker.is_main:
        print(f"\n2. all_gather on {worker.world_size} ranks, median of {args.repeats}")
        header = ["each rank sends", "as", "collectives", "bytes received", "ms", "ms / tensor's"]
        print_table(header, rows)


# 3. What it can do.


class Innocent:
    """Unpickling this runs code of the sender, then returns the settings that it carries.

    pickle asks an object by which function and with which arguments to rebuild it, and calls that
    function in the receiver, whatever it is. Here it is eval, with a text that the sender wrote.
    """

    def __init__(self, settings: dict):
        self.settings = settings

    def __reduce__(self):
        note = f"code of process {os.getpid()} ran here"
        code = f"__import__('os').environ.update(VISITOR={note!r}) or {self.settings!r}"
        return eval, (code,)


def broadcast_json(value, src: int = 0, group=None, device="cpu"):
    """Send rank `src`'s value to every rank as JSON: lists, dicts with string keys, ...

    Rank `src` sends the length first, so the other ranks need not know it. (broadcast_object_list
    needs a list of the right length on every rank.)
    """
    data = torch.empty(0, dtype=torch.uint8, device=device)
    if dist.get_rank(group) == src:
        data = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8).to(device)
    length = torch.tensor(len(data), device=device)
    dist.broadcast(length, group_src=src, group=group)
    if dist.get_rank(group) != src:
        data = data.new_empty(int(length))
    dist.broadcast(data, group_src=src, group=group)
    return json.loads(data.cpu().numpy().tobytes())


def show_danger(worker: Worker) -> None:
    os.environ.pop("VISITOR", None)
    before = os.environ.get("VISITOR", "not set")
    box = [Innocent({"lr": 0.1})] if worker.rank == 0 else [None]
    dist.broadcast_object_list(box, group_src=0)
    received = "(sent it)" if worker.rank == 0 else box[0]
    after = os.environ.get("VISITOR", "not set")
    columns = {"pid": os.getpid(), "VISITOR before": before, "received": received, "after": after}
    print_by_rank(worker, "3. broadcast_object_list of settings", **columns)

    box = broadcast_json(
        {"lr": 0.1, "layers": [64, 10]} if worker.rank == 0 else None, device=worker.device
    )
    print_by_rank(worker, "the safe way, broadcast_json", received=box)
    if worker.is_main:
        for name, call in (
            ("JSON", lambda: json.dumps(Innocent({"lr": 0.1}))),
            ("torch.load, weights_only=True", lambda: safe_load(Innocent({"lr": 0.1}))),
        ):
            try:
                call()
                print(f"{name}: accepted")
            except (TypeError, pickle.UnpicklingError) as error:
                print(f"{name} refuses it: {type(error).__name__}")


def safe_load(thing):
    """Save and load `thing` like an untrusted checkpoint: tensors and plain containers only.

    Raises pickle.UnpicklingError for anything else. Works for bytes from a peer, too.
    """
    file = io.BytesIO()
    torch.save(thing, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def parse_args():
    parser = ArgumentParser(description="Object collectives: use, cost, danger.")
    parser.add_argument("--repeats", type=at_least(1), default=10, help="samples per timing")
    parser.add_argument("--device", choices=DEVICES, default="auto", help=DEVICE_HELP)
    return parser.parse_args()


if __name__ == "__main__":
    main()
