"""Start a DDP job without torchrun: with torch.multiprocessing.spawn, or by hand.

    python ddp_basics/spawn.py --how spawn --ranks 2
    python ddp_basics/spawn.py --how environment --ranks 2
    torchrun --standalone --nproc_per_node=2 ddp_basics/spawn.py
    python ddp_basics/spawn.py --how environment --ranks 2 --kill-rank 1     # ends with status 1

Look at the last line: all three ways to start the ranks give the same loss and parameters, on CPUs
to the last bit. The 60 lines that start them here do only a part of what torchrun does:

                                              spawn      by hand    torchrun
    RANK, WORLD_SIZE, MASTER_ADDR, ...        your code  your code  yes
    a port that no other program takes        your code  your code  yes
    stops the other ranks when one dies       yes        your code  yes
    says which rank failed first, and why     yes        no         yes, with @record
    starts again (--max-restarts)             no         no         yes
    several nodes (--nnodes), logs per rank   no         no         yes
"""

import hashlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from arguments import DEVICE_HELP, DEVICES, ArgumentParser, at_least
from checkpoint import write_file
from data import load_dataset
from model import SmallCNN
from runtime import Worker, distributed_worker
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn.parallel import DistributedDataParallel


@record
def main() -> None:
    args = parse_args()
    if "RANK" in os.environ:  # torchrun, or start_by_hand below, has started this process
        run_rank(args)
        return
    # There is no launcher to clean up: turn SIGTERM into an exception, so that `finally` runs.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    # Set this before the ranks start: they import torch, which reads it, before they run our code.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # Asking the system for a free port, closing it and passing on its number is a race: another
    # program may take the port in between. So this process opens the store on a port of the
    # system's choice (0), and keeps it open until all ranks have ended, as torchrun does.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    start = start_by_spawn if args.how == "spawn" else start_by_hand
    failure = start(args, store.port)
    if failure:
        sys.exit(f"spawn.py: {failure}; the other ranks were stopped")


def environment(rank: int, ranks: int, port: int) -> dict[str, str]:
    """The variables that torchrun sets for each process (on one node)."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),  # on one node: the same as the rank
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        # torchrun sets this too. It tells rank 0 not to open the port, because it is open already.
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }


def start_by_spawn(args, port: int) -> str | None:
    """Start the ranks, wait until they end, return the error or None. The traps of spawn:

    - Each child imports this file again: without the __main__ guard at the end it would start
      children of its own.
    - The function and its arguments are pickled: the function must be at the top level of a file
      (no lambda, no notebook cell), and no argument may be an open file, generator, process group.
    - A child's return value is lost: let it write a file. Its exception arrives here as traceback.
    - Python waits at its exit for children that still run, so `finally` kills them.
    """
    context = mp.spawn(spawned_rank, (args, port), args.ranks, join=False)
    try:
        while not context.join():  # stops the other ranks after a failure, then raises
            pass
    except (mp.ProcessExitedException, mp.ProcessRaisedException) as error:
        if getattr(error, "exit_code", 1) == 2:
            sys.exit(2)  # a mistake of the user's, which the rank has reported
        return f"rank {error.error_index} failed: {error.msg.strip()}"
    finally:
        for process in context.processes:
            process.kill()


def spawned_rank(rank: int, args, port: int) -> None:
    os.environ.update(environment(rank, args.ranks, port))
    run_rank(args)


def start_by_hand(args, port: int) -> str | None:
    """Start one ordinary command per rank. Any launcher that sets the environment can do this: a
    shell script, ssh, a cluster's scheduler.
    """
    command = [sys.executable, *sys.argv]
    processes = []
    try:
        for rank in range(args.ranks):
            env = os.environ | environment(rank, args.ranks, port)
            processes.append(subprocess.Popen(command, env=env))
        # Watch all ranks at once. If rank 1 dies, rank 0 waits for it in a collective, so waiting
        # for rank 0 first would never end.
        while True:
            statuses = [process.poll() for process in processes]  # None: it still runs
            for rank, status in enumerate(statuses):
                if status == 2:
                    sys.exit(2)  # a mistake of the user's, which the rank has reported
                if status:
                    return f"rank {rank} failed: exit status {status}"  # negative: a signal
            if None not in statuses:
                return None
            time.sleep(0.05)
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.wait()


def run_rank(args) -> None:
    with distributed_worker(args.device) as worker:
        train(args, worker)


def train(args, worker: Worker) -> None:
    images, labels = load_dataset("digits")[0][:]
    torch.manual_seed(0)
    model = SmallCNN().to(worker.device)
    gpu = None if worker.device.type == "cpu" else [worker.device.index]
    ddp_model = DistributedDataParallel(model, device_ids=gpu)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for step in range(args.steps):
        if step == args.steps // 2 and worker.rank == args.kill_rank:
            os.kill(os.getpid(), signal.SIGKILL)  # as the kernel does when memory runs out
        if step == args.steps // 2 and worker.rank == args.raise_rank:
            raise RuntimeError(f"rank {worker.rank} was told to fail in step {step}")
        start = step * args.batch_size
        global_batch = torch.arange(start, start + args.batch_size) % len(images)
        local_batch = global_batch[worker.rank :: worker.world_size]
        optimizer.zero_grad()
        logits = ddp_model(images[local_batch].to(worker.device))
        loss = F.cross_entropy(logits, labels[local_batch].to(worker.device))
        loss.backward()
        optimizer.step()
    loss = loss.detach() / worker.world_size
    dist.all_reduce(loss)
    if worker.is_main:
        parameters = {name: p.detach().cpu() for name, p in model.named_parameters()}
        data = b"".join(p.numpy().tobytes() for p in parameters.values())
        print(f"loss {loss:.6f}   sha256 of the parameters {hashlib.sha256(data).hexdigest()[:16]}")
        if args.output:
            write_file(args.output, {"loss": float(loss), "parameters": parameters})


def parse_args():
    parser = ArgumentParser(description="Start ranks without torchrun.")
    add = parser.add_argument
    add(
        "--how",
        choices=("spawn", "environment"),
        default="spawn",
        help="how to start ranks without torchrun",
    )
    add("--ranks", type=at_least(1), default=2, help="ranks to start without torchrun (default: 2)")
    add("--steps", type=at_least(1), default=20, help="optimizer steps")
    add("--batch-size", type=at_least(1), default=48, help="images per global batch (default: 48)")
    add("--kill-rank", type=at_least(0), help="kill this rank half-way")
    add("--raise-rank", type=at_least(0), help="raise an exception on this rank half-way")
    add("--output", type=Path, help="save the final loss and parameters to this file")
    add("--device", choices=DEVICES, default="auto", help=DEVICE_HELP)
    args = parser.parse_args()
    ranks = int(os.environ.get("WORLD_SIZE", args.ranks))
    for flag, rank in (("--kill-rank", args.kill_rank), ("--raise-rank", args.raise_rank)):
        if rank is not None and rank >= ranks:
            parser.error(f"{flag} must be from 0 to {ranks - 1}, not {rank}")
    if args.batch_size % ranks:
        parser.error(f"--batch-size {args.batch_size} does not divide over {ranks} rank(s)")
    return args


if __name__ == "__main__":
    main()
