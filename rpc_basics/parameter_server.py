"""A parameter server and its trainers: synchronous, asynchronous, and without any lock (Hogwild).

    torchrun --standalone --nproc_per_node=4 rpc_basics/parameter_server.py
    torchrun --standalone --nproc_per_node=4 rpc_basics/parameter_server.py --compare --steps 5
    torchrun --standalone --nproc_per_node=4 rpc_basics/parameter_server.py --mode sync async
    torchrun --standalone --nproc_per_node=5 rpc_basics/parameter_server.py --servers 2 --data text

The first workers are servers, each with a part of the parameters (parameter_shard.py). The others
train: they pull the parameters, compute a gradient and push it. Look at the staleness: how many
updates the others have made between pull and push. --mode, --pull-every and --compress take several
values and make a table; --plot draws it.
"""

import argparse
import itertools
import os
import time
from pathlib import Path

import one_process
import server_checkpoint
import torch
from arguments import ArgumentParser, UserError, above, at_least, between, fail
from calls_in_flight import as_they_end, is_there
from compression import KINDS, Compressor, size_of
from parameter_server_plot import plot, print_head, print_means, print_row
from parameter_shard import MODES, Settings, Shard
from rpc_worker import RpcWorker, rpc_worker
from tasks import TASKS, Task, gradient_of, load_task
from torch import Tensor
from torch.distributed import rpc
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn.utils import parameters_to_vector, vector_to_parameters


@record
def main() -> None:
    args = parse_args()
    check_role(args)
    torch.set_num_threads(1)  # the workers are what runs side by side
    least, servers = args.servers + 1, range(args.servers)
    threads = 16 + int(os.environ.get("WORLD_SIZE", "1"))  # a synchronous push holds one until all
    with rpc_worker(args.timeout, threads, least, required=servers) as worker:  # have come
        if worker.rank == 0:  # the first server also starts the runs; the others wait for calls
            run_all(args, worker)


def train(servers: list[rpc.RRef], settings: Settings, rank: int, lengths: list[int]) -> dict:
    """What a trainer does until the servers have made all updates. Worker 0 calls this.

    lengths: how many parameters each server has.
    """
    task = load_task(settings.data)
    model = task.make_model(settings.seed)
    compressors = [Compressor(settings.compress) for _ in servers]
    pushes = sent = 0
    while True:
        calls = [server.rpc_async().pull() for server in servers]  # all servers at once
        versions, values = zip(*[call.wait() for call in calls], strict=True)
        if max(versions) >= settings.updates:
            return {"pushes": pushes, "bytes": sent}
        vector_to_parameters(torch.cat(values), model.parameters())
        for number in range(settings.pull_every):  # the later ones are of older parameters
            inputs, labels = share_of_batch(task, settings, rank, versions[0] + number)
            pieces = gradient_of(model, inputs, labels)[0].split(lengths)
            if rank == settings.trainers[-1]:
                time.sleep(settings.slow)
            messages = [c.compress(piece) for c, piece in zip(compressors, pieces, strict=True)]
            calls = [
                server.rpc_async().push(rank, version, message, len(labels))
                for server, version, message in zip(servers, versions, messages, strict=True)
            ]
            pushes += 1
            sent += sum(map(size_of, messages))
            if not all([call.wait() for call in calls]):
                break  # too old


def share_of_batch(task: Task, settings: Settings, rank: int, number: int) -> tuple[Tensor, Tensor]:
    """Synchronous: a part of the batch that one process would have; else a batch of its own."""
    part, parts = settings.trainers.index(rank), len(settings.trainers)
    if settings.mode == "sync":
        inputs, labels = task.batch(settings.batch_size, settings.seed, number)
        return inputs[part::parts], labels[part::parts]
    return task.batch(settings.batch_size // parts, settings.seed, number, rank)


def start_trainers(servers: list[rpc.RRef], settings: Settings, lengths: list[int]) -> list[dict]:
    """Have each trainer train, until all have ended or are gone; returns what they report."""
    calls = {
        rank: rpc.rpc_async(
            RpcWorker.name_of(rank), train, args=(servers, settings, rank, lengths), timeout=0
        )  # without a time-out: it lasts as long as the training
        for rank in settings.trainers
    }
    reports = {}
    gone = set()
    for rank, call in as_they_end(calls, settings.patience):
        try:
            reports[rank] = call.wait()
        except RuntimeError:
            for number in range(len(servers)):
                if not is_there(number, settings.patience):
                    raise RuntimeError(f"worker{number}, a server, is gone") from None
            if is_there(rank, settings.patience):
                raise  # its own error, and not its end
            gone.add(rank)
            left = len(settings.trainers) - len(gone)
            print(f"worker{rank} is gone: {left} trainer(s) left", flush=True)
            for server in servers:
                server.rpc_sync().give_up(rank)
    if not reports:
        raise RuntimeError("no trainer is left")
    for rank in set(calls) - set(reports) - gone:
        print(f"worker{rank} does not come to its end, and is not waited for", flush=True)
    return list(reports.values())


def run(settings: Settings, number_of_servers: int) -> dict:
    """Train; returns what there is to say about it."""
    task = load_task(settings.data)
    model = task.make_model(settings.seed)
    parts = parameters_to_vector(model.parameters()).detach().tensor_split(number_of_servers)
    states = saved_states(settings, number_of_servers)
    servers = [
        rpc.remote(RpcWorker.name_of(k), Shard, args=(k, parts[k], settings, states[k]))
        for k in range(number_of_servers)
    ]
    begin = time.perf_counter()
    reports = start_trainers(servers, settings, [len(part) for part in parts])
    seconds = time.perf_counter() - begin
    vector = torch.cat([server.rpc_sync().pull()[1] for server in servers])
    vector_to_parameters(vector, model.parameters())
    gradients = [server.rpc_sync().gradients() for server in servers]
    version, stalenesses, refused = servers[0].rpc_sync().counts()
    pushes = sum(report["pushes"] for report in reports)
    return {
        "settings": settings,
        "version": version,
        "accuracy": task.accuracy(model),
        "stalenesses": stalenesses,
        "refused": refused,
        "seconds": seconds,
        "bytes": sum(report["bytes"] for report in reports) / max(1, pushes),  # of one push
        "vector": vector,
        "gradients": {v: torch.cat([of[v] for of in gradients]) for v in gradients[0]},
    }


def run_all(args: argparse.Namespace, worker: RpcWorker) -> None:
    """One run for each combination of what is to be compared, and a row about each."""
    trainers = tuple(range(args.servers, worker.world_size))
    if args.batch_size < len(trainers):
        raise UserError(f"--batch-size {args.batch_size} is too small for {len(trainers)} trainers")
    rows = []
    seeds = range(args.seed, args.seed + args.seeds)
    combinations = itertools.product(args.mode, args.pull_every, args.compress, seeds)
    print_head()
    for mode, pull_every, compress, seed in combinations:
        if mode == "sync" and pull_every > min(args.pull_every):
            continue  # its trainers always have the newest parameters
        settings = Settings(
            data=args.data,
            mode=mode,
            steps=args.steps,
            batch_size=args.batch_size,
            lr=args.lr,
            momentum=args.momentum,
            pull_every=1 if mode == "sync" else pull_every,
            max_staleness=args.max_staleness,
            compress=compress,
            seed=seed,
            trainers=trainers,
            slow=args.slow,
            patience=args.patience,
            save=args.save and str(args.save),
            save_every=args.save_every,
        )
        rows.append(run(settings, args.servers))
        print_row(rows[-1])
        if args.compare and mode == "sync":
            one_process.compare(settings, rows[-1]["vector"], rows[-1]["gradients"])
    if args.seeds > 1:
        print_means(rows)
    if args.plot:
        plot(rows, args.plot)


def saved_states(settings: Settings, servers: int) -> list[dict | None]:
    """Where each server goes on; None: at the beginning."""
    if settings.save is None:
        return [None] * servers
    folder = Path(settings.save)
    version = server_checkpoint.newest(folder, servers)
    if version == 0:
        return [None] * servers
    print(f"continuing from version {version} in {folder}", flush=True)
    return [server_checkpoint.load(folder, k, version, settings.identity()) for k in range(servers)]


def check_role(args: argparse.Namespace) -> None:
    rank = int(os.environ.get("RANK", "0"))
    role = "server" if rank < args.servers else "trainer"
    if args.role not in (None, role):
        fail(f"--role {args.role}: rank {rank} is a {role}; servers are the first {args.servers}")


def parse_args() -> argparse.Namespace:
    parser = ArgumentParser(description="Parameter servers and their trainers.")
    add = parser.add_argument
    add("--data", choices=TASKS, default="digits")
    add("--mode", nargs="+", choices=MODES, default=["sync"])
    add("--servers", type=at_least(1), default=1, help="the first workers; the others train")
    add("--role", choices=("server", "trainer"), help="check that this process is one")
    add("--steps", type=at_least(1), default=100, help="gradients of each trainer")
    add("--batch-size", type=at_least(1), default=120, help="of all trainers together")
    add("--lr", type=above(0), default=0.1)
    add("--momentum", type=between(0, 1), default=0.9)
    add("--pull-every", nargs="+", type=at_least(1), default=[1], help="gradients; more: staler")
    add("--max-staleness", type=at_least(0), help="refuse gradients of older parameters")
    add("--compress", nargs="+", choices=KINDS, default=["none"], help="what pushes carry")
    add("--slow", type=between(0, 10), default=0, help="seconds a step, of the last trainer")
    add("--seed", type=at_least(0), default=0)
    add("--seeds", type=at_least(1), default=1, help="so many runs, with seeds from --seed on")
    add("--compare", action="store_true", help="sync: with the same training in one process")
    add("--save", type=Path, help="folder: servers save there, and continue from there")
    add("--save-every", type=at_least(1), default=20, help="updates")
    add("--plot", type=Path, help="write a picture of staleness and accuracy there")
    add("--patience", type=above(0), default=10, help="seconds to wait for a trainer's gradient")
    add("--timeout", type=above(0), default=60, help="seconds, of each call")
    args = parser.parse_args()
    if args.patience * 2 > args.timeout:
        fail(f"--patience {args.patience:g} must be at most half of --timeout {args.timeout:g}")
    parser.make_folder("--save", args.save)
    runs = len(args.mode) * len(args.pull_every) * len(args.compress) * args.seeds
    if args.save and runs > 1:
        fail(f"--save is for one run, not {runs}")
    return args


if __name__ == "__main__":
    main()
