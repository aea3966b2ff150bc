"""Backends (Gloo, NCCL, ...): which this build has, what each can do here, which one to use.

    torchrun --standalone --nproc_per_node=2 collectives/backends.py
    python collectives/backends.py                     # a world of one: no send and receive

A backend is the library that moves the bytes. Look at

1. what this build of PyTorch contains, and what works on this machine.
2. the table of operations: the script calls each one on every rank and checks its result. With one
   GPU per rank the table has three columns: Gloo on CPU tensors, Gloo on GPU tensors, NCCL.
3. one group with one backend per device: the tensor's device chooses the backend.
4. the guide: which backend for which tensors.
"""

from datetime import timedelta
from functools import partial
from functools import reduce as reduce_pairs
from operator import and_

import new_names
import torch
import torch.distributed as dist
from arguments import DEVICE_HELP, DEVICES, ArgumentParser
from runtime import Worker, distributed_worker
from tables import print_table
from torch.distributed.elastic.multiprocessing.errors import record

BETWEEN_TWO = ("isend, irecv", "receive from any source")


@record
def main() -> None:
    args = parse_args()
    with distributed_worker(args.device) as worker:
        status = {name: how_usable(name) for name in ("gloo", "nccl", "xccl", "ucc", "mpi")}
        show_backends(worker, status)
        show_operations(worker)
        show_one_backend_per_device(worker)
        header = ["tensors", "backend", "here"]
        show(worker, "4. Which backend for which tensors?", header, guide(status))


def show_backends(worker: Worker, status: dict[str, str]) -> None:
    capability = dist.Backend.backend_capability  # backend -> devices
    rows = [[name, ", ".join(capability[name]), here] for name, here in status.items()]
    show(worker, "1. Backends of this build", ["backend", "devices", "here"], rows)


def how_usable(name: str) -> str:
    """Whether a group can be made with this backend: "yes", or the reason why not. A collective."""
    if not dist.is_backend_available(name):
        return "not in this build"
    return attempt(lambda: dist.new_group(backend=name, timeout=timedelta(seconds=60)) is not None)


def attempt(operation) -> str:
    """ "yes" if `operation` returns True, else what is wrong."""
    try:
        return "yes" if operation() else "WRONG RESULT"
    except Exception as error:
        return reason(error)


def reason(error: Exception, width: int = 60) -> str:
    """The first sentence of an error, without the C++ file that it comes from."""
    text = str(error).splitlines()[0].split("] ", 1)[-1].split(". ")[0]
    return text if len(text) <= width else text[: width - 3] + "..."


def show_operations(worker: Worker) -> None:
    gloo = dist.new_group(backend="gloo", timeout=timedelta(seconds=60))
    columns = {"gloo, CPU tensors": try_operations("cpu", gloo)}
    if worker.device.type == "cuda":
        columns["gloo, GPU tensors"] = try_operations(worker.device, gloo)
        # The default group has both backends, and monitored_barrier is Gloo's.
        columns["gloo + nccl, GPU tensors"] = try_operations(worker.device, None)
    names = list(columns["gloo, CPU tensors"])
    rows = [[name, *(column[name] for column in columns.values())] for name in names]
    show(worker, "2. Operations, tried on all ranks", ["operation", *columns], rows)


def try_operations(device, group) -> dict[str, str]:
    """Call every operation on tensors of `device`: name -> "yes", or what went wrong."""
    # Every rank raises such an error before it sends anything, so no rank is left waiting. But
    # between two ranks Gloo writes from a GPU's address into a socket, and the connection ends.
    gloo_on_gpu = dist.get_backend(group) == "gloo" and torch.device(device).type != "cpu"
    mine = {}
    for name, run in operations(device, group).items():
        if name in BETWEEN_TWO and dist.get_world_size(group) == 1:
            mine[name] = "needs two ranks"
        elif name in BETWEEN_TWO and gloo_on_gpu:
            mine[name] = "no: between two ranks Gloo sends CPU tensors only"
        else:
            mine[name] = attempt(run)
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    return {
        name: next((said[name] for said in everyone if said[name] != "yes"), "yes") for name in mine
    }


def operations(device, group) -> dict:
    """name -> a function that calls the operation and returns whether its result is right."""
    rank, n = dist.get_rank(group), dist.get_world_size(group)
    number = partial(torch.tensor, device=device)
    everyone = [float(r + 1) for r in range(n)]  # rank r starts with r + 1
    Op = dist.ReduceOp

    def mine(dtype=torch.float32):
        return number([rank + 1], dtype=dtype)

    def room():
        return [number([0.0]) for _ in range(n)]

    def all_reduce(expected, op=Op.SUM, dtype=torch.float32):
        x = mine(dtype)
        dist.all_reduce(x, op, group=group)
        return x.item() == expected

    def broadcast():
        x = mine()
        dist.broadcast(x, group_src=0, group=group)
        return x.item() == 1

    def reduce():
        x = mine()
        dist.reduce(x, group_dst=0, group=group)
        return rank > 0 or x.item() == sum(everyone)

    def gather():
        parts = room() if rank == 0 else None
        dist.gather(mine(), parts, group_dst=0, group=group)
        return rank > 0 or torch.cat(parts).tolist() == everyone

    def all_gather(uneven=False):
        sizes = [r + 1 if uneven else 1 for r in range(n)]
        parts = [number([0.0] * size) for size in sizes]
        dist.all_gather(parts, mine().repeat(sizes[rank]), group=group)
        expected = [[e] * size for e, size in zip(everyone, sizes, strict=True)]
        return [part.tolist() for part in parts] == expected

    def all_gather_one_tensor():
        gathered = number([0.0] * n)
        new_names.all_gather_single(gathered, mine(), group=group)
        return gathered.tolist() == everyone

    def scatter():
        x, parts = number([0.0]), [number([e]) for e in everyone]
        dist.scatter(x, parts if rank == 0 else None, group_src=0, group=group)
        return x.item() == rank + 1

    def reduce_scatter():
        x = number([0.0])
        dist.reduce_scatter(x, [number([e]) for e in everyone], group=group)
        return x.item() == n * (rank + 1)

    def reduce_scatter_one_tensor():
        x = number([0.0])
        new_names.reduce_scatter_single(x, number(everyone), group=group)
        return x.item() == n * (rank + 1)

    def all_to_all():
        parts = room()
        dist.all_to_all(parts, [mine() for _ in range(n)], group=group)
        return torch.cat(parts).tolist() == everyone

    def all_to_all_uneven():  # rank r sends r + 1 numbers to each
        x = number([0.0] * int(sum(everyone)))
        splits = [int(e) for e in everyone]
        dist.all_to_all_single(
            x, mine().repeat(n * (rank + 1)), splits, [rank + 1] * n, group=group
        )
        return x.tolist() == [e for e in everyone for _ in range(int(e))]

    def ring():  # batched: NCCL must see a send and its receive together, or two ranks deadlock
        x, right, left = number([0.0]), (rank + 1) % n, (rank - 1) % n
        pairs = [(dist.isend, mine(), right), (dist.irecv, x, left)]
        ops = [dist.P2POp(what, t, group=group, group_peer=peer) for what, t, peer in pairs]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        return x.item() == left + 1

    def any_source():  # start the receive first: a send without a receiver would wait
        x, error = number([0.0]), None
        try:
            work = dist.irecv(x, None, group=group) if rank == 0 else None
        except Exception as failure:
            error = failure
        errors = [None] * n
        dist.all_gather_object(errors, error and reason(error))
        if errors[0]:
            raise RuntimeError(errors[0])
        if rank == 1:
            dist.send(mine(), group=group, group_dst=0)
        if rank == 0:
            work.wait()
        return rank > 0 or x.item() == 2

    def objects():
        gathered = [None] * n
        dist.all_gather_object(gathered, {"rank": rank}, group=group)
        return [g["rank"] for g in gathered] == list(range(n))

    def split():
        return dist.get_world_size(dist.split_group(group, [list(range(n))])) == n

    def premul_sum():
        op = dist.ReduceOp.PREMUL_SUM  # older versions of torch have only a private function
        op = op(2.0) if callable(op) else dist._make_nccl_premul_sum(2.0)
        return all_reduce(2 * sum(everyone), op)

    total, average = sum(everyone), sum(everyone) / n
    conjunction = reduce_pairs(and_, range(1, n + 1))
    return {
        "broadcast": broadcast,
        "reduce": reduce,
        "all_reduce": partial(all_reduce, total),
        "all_reduce, AVG": partial(all_reduce, average, Op.AVG),
        "all_reduce, AVG of int64": partial(all_reduce, total // n, Op.AVG, torch.int64),
        "all_reduce, PREMUL_SUM": premul_sum,
        "all_reduce, BAND of int64": partial(all_reduce, conjunction, Op.BAND, torch.int64),
        "all_reduce, bfloat16": partial(all_reduce, total, dtype=torch.bfloat16),
        "all_reduce, complex64": partial(all_reduce, total, dtype=torch.complex64),
        "gather": gather,
        "all_gather": all_gather,
        "all_gather, uneven sizes": partial(all_gather, uneven=True),
        "all_gather_single": all_gather_one_tensor,
        "scatter": scatter,
        "reduce_scatter": reduce_scatter,
        "reduce_scatter_single": reduce_scatter_one_tensor,
        "all_to_all": all_to_all,
        "all_to_all_single, uneven": all_to_all_uneven,
        "isend, irecv": ring,
        "receive from any source": any_source,
        "barrier": lambda: dist.barrier(group=group) is None,
        "monitored_barrier": lambda: dist.monitored_barrier(group=group) is None,
        "all_gather_object": objects,
        "split_group": split,
    }


def show_one_backend_per_device(worker: Worker) -> None:
    rows = []
    for backend in ("gloo", "cpu:gloo", "cuda:gloo", "cpu:gloo,cuda:nccl"):
        try:
            group = dist.new_group(backend=backend, timeout=timedelta(seconds=60))
        except Exception as error:
            rows.append([backend, "-", reason(error), "-"])
            continue
        # The tensor's device chooses the backend. All tensors of one collective are on one device.
        on_cpu = attempt(lambda group=group: add_one("cpu", group))
        on_gpu = "no GPU here"
        if worker.device.type == "cuda":
            on_gpu = attempt(lambda group=group: add_one(worker.device, group))
        rows.append([backend, dist.get_backend_config(group), on_cpu, on_gpu])
    header = ["backend=", "get_backend_config", "all_reduce of a CPU tensor", "of a GPU tensor"]
    show(worker, "3. One group, one backend per device", header, rows)


def add_one(device, group) -> bool:
    x = torch.ones(1, device=device)
    dist.all_reduce(x, group=group)
    return x.item() == dist.get_world_size(group)


def guide(status: dict[str, str]) -> list[list[str]]:
    """Rows of (where the tensors are, the backend to use, whether it works here)."""
    both = next((status[b] for b in ("gloo", "nccl") if status[b] != "yes"), "yes")
    return [
        ["on the CPU", "gloo", status["gloo"]],
        ["on NVIDIA or AMD GPUs, one per rank", "nccl", status["nccl"]],
        ["on both (checkpoints, metrics)", "cpu:gloo,cuda:nccl", both],
        ["on Intel GPUs", "xccl", status["xccl"]],
        ["under a cluster's own MPI", "mpi, in a build from source", status["mpi"]],
    ]


def show(worker: Worker, title: str, header: list[str], rows: list[list]) -> None:
    if worker.is_main:
        print(f"\n{title}")
        print_table(header, rows)


def parse_args():
    parser = ArgumentParser(description="Which backends this build has, and what each can do.")
    parser.add_argument("--device", choices=DEVICES, default="auto", help=DEVICE_HELP)
    return parser.parse_args()


if __name__ == "__main__":
    main()
