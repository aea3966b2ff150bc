"""Point-to-point: send, recv, isend, tags, batches; a deadlock and three cures; a ring; a halo.

    torchrun --standalone --nproc_per_node=2 collectives/point_to_point.py
    torchrun --standalone --nproc_per_node=3 collectives/point_to_point.py --cells 100 --steps 500
    torchrun --standalone --nproc_per_node=4 collectives/point_to_point.py --timeout 0.5

Look at

1. send and recv: a value that passes through every rank in turn.
2. the deadlock: every rank first sends, then receives. A send ends when its receiver takes the
   message, so every rank waits for ever (here: for --timeout seconds). Three cures follow.
3. isend: the transfer still reads the tensor after the call has returned. If a rank changes the
   tensor before wait(), it sends the changed values.
4. tags, and a receive from any source. NCCL has neither: make a second group, with Gloo.
5. a ring shift: after N shifts every value is back on its own rank.
6. a halo exchange: each rank computes one piece of a cooling rod, and receives one cell per side
   and step from its neighbours. The result has the bits of a single-process run, also where the
   number of ranks does not divide the number of cells.
"""

import math
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from arguments import DEVICE_HELP, DEVICES, ArgumentParser, UserError, above, at_least
from runtime import Worker, distributed_worker
from tables import print_by_rank, print_table
from torch.distributed.elastic.multiprocessing.errors import record


@record
def main() -> None:
    args = parse_args()
    with distributed_worker(args.device) as worker:
        if worker.world_size < 2:
            raise UserError("needs 2 ranks or more: torchrun --standalone --nproc_per_node=2 ...")
        if args.cells < worker.world_size:
            raise UserError(f"--cells {args.cells} leaves some of {worker.world_size} ranks none")
        # For tags and any source, which NCCL lacks, and for errors that must not end the process.
        gloo = dist.new_group(backend="gloo")
        show_pass_along(worker)
        show_deadlock_and_cures(args.timeout, gloo, worker)
        show_early_change(gloo, worker)
        show_tags_and_any_source(gloo, worker)
        show_ring_shift(worker)
        show_heat(args.cells, args.steps, worker)


def neighbours(group=None) -> tuple[int, int]:
    """The left and the right neighbour of this rank in a ring (ranks within the group)."""
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    return (rank - 1) % world_size, (rank + 1) % world_size


def show_pass_along(worker: Worker) -> None:
    value = torch.tensor([100], device=worker.device)
    if worker.rank > 0:
        dist.recv(value, src=worker.rank - 1)  # waits until `value` is filled
    received = int(value)
    value += worker.rank
    if worker.rank < worker.world_size - 1:
        dist.send(value, dst=worker.rank + 1)  # waits until the message is taken
    title = "1. send and recv: a value goes from rank to rank; each rank adds its number"
    print_by_rank(worker, title, starts_from=received, passes_on=int(value))


def send_first(outgoing, incoming, group=None, timeout: float = 1.0) -> None:
    """The mistake: every rank sends first, so no rank receives. dist.send is also isend and wait,
    but waits for the timeout of the group: by default 30 minutes (10 with backend nccl)."""
    left, right = neighbours(group)
    work = dist.isend(outgoing, group=group, group_dst=right)
    work.wait(timedelta(seconds=timeout))  # raises; the group cannot be used after that
    dist.recv(incoming, group=group, group_src=left)


def take_turns(outgoing, incoming, group=None) -> None:
    """Cure 1: even ranks send first, odd ranks receive first. (Also right in an odd ring.)"""
    left, right = neighbours(group)
    if dist.get_rank(group) % 2 == 0:
        dist.send(outgoing, group=group, group_dst=right)
        dist.recv(incoming, group=group, group_src=left)
    else:
        dist.recv(incoming, group=group, group_src=left)
        dist.send(outgoing, group=group, group_dst=right)


def do_not_wait(outgoing, incoming, group=None) -> None:
    """Cure 2, with Gloo: isend and irecv start a transfer and return; then wait for both.

    NCCL runs the two one after another, so two ranks can block: use cure 3.
    """
    left, right = neighbours(group)
    sending = dist.isend(outgoing, group=group, group_dst=right)
    receiving = dist.irecv(incoming, group=group, group_src=left)
    sending.wait()
    receiving.wait()


def batch(outgoing, incoming, group=None) -> None:
    """Cure 3: start both in one batch, in any order. Use this one: NCCL runs a batch as one
    operation, while single sends and receives run one after another on its stream."""
    left, right = neighbours(group)
    send = dist.P2POp(dist.isend, outgoing, group=group, group_peer=right)
    receive = dist.P2POp(dist.irecv, incoming, group=group, group_peer=left)
    for work in dist.batch_isend_irecv([send, receive]):
        work.wait()


def show_deadlock_and_cures(timeout: float, gloo, worker: Worker) -> None:
    rows, error = [], None
    for way in (send_first, take_turns, do_not_wait, batch):
        for numel in (1, 1 << 20):
            outgoing = torch.full((numel,), float(worker.rank))
            incoming = torch.full_like(outgoing, -1)
            group, limit = gloo, {}
            if way is send_first:  # each attempt breaks its group
                group, limit = dist.new_group(backend="gloo"), {"timeout": timeout}
            dist.barrier()
            started = time.perf_counter()
            try:
                way(outgoing, incoming, group, **limit)
                result = bool((incoming == (worker.rank - 1) % worker.world_size).all())
            except RuntimeError as failure:
                result = str(failure).split("] ")[-1]
            views = [None] * worker.world_size
            dist.all_gather_object(views, (result, time.perf_counter() - started))
            good = [result is True for result, _ in views].count(True)
            error = error or next((result for result, _ in views if result is not True), None)
            longest = f"{max(seconds for _, seconds in views):.3f}"
            rows.append([way.__name__, 4 * numel, good, worker.world_size - good, longest])
    if worker.is_main:
        print("\n2. Every rank sends to the right and receives from the left (Gloo)")
        print_table(["way", "bytes", "ranks that received", "ranks stuck", "after s"], rows)
        print(f"send_first: {error}")


def show_early_change(gloo, worker: Worker) -> None:
    tensor, done = torch.tensor([7.0]), "-"
    if worker.rank == 0:
        work = dist.isend(tensor, 1, group=gloo)
        tensor.fill_(-1)
        done = work.is_completed()
    dist.barrier()  # rank 1 receives only after this
    if worker.rank == 0:
        work.wait()  # from here on the tensor is ours again
    elif worker.rank == 1:
        dist.recv(tensor, 0, group=gloo)
    title = "3. Rank 0 sends 7 with isend, then writes -1 into the tensor before it waits (Gloo)"
    print_by_rank(worker, title, isend_completed_before_the_receive=done, tensor_at_the_end=tensor)


def receive_tagged(tag: int, source: int, group=None) -> float:
    """The number sent with this tag, even if other tags were sent before it."""
    number = torch.empty(1)
    dist.recv(number, source, group=group, tag=tag)
    return number.item()


def receive_from_anyone(count: int, group=None) -> dict[int, float]:
    """One number from each of `count` ranks, by sender: recv returns the sender's global rank."""
    number, received = torch.empty(1), {}
    for _ in range(count):
        sender = dist.recv(number, group=group)  # no source is named
        received[sender] = number.item()
    return received


def show_tags_and_any_source(gloo, worker: Worker) -> None:
    tagged, anyone = "-", "-"
    if worker.rank == 0:
        works = [dist.isend(torch.tensor([10.0 * tag]), 1, group=gloo, tag=tag) for tag in (7, 8)]
        for work in works:
            work.wait()
        anyone = receive_from_anyone(worker.world_size - 1, gloo)
    else:
        if worker.rank == 1:
            tagged = [receive_tagged(tag, 0, gloo) for tag in (8, 7)]
        # The last rank sends first, and each rank waits for a message from the next one. So the
        # order is the same in every run; usually it is unknown.
        if worker.rank < worker.world_size - 1:
            dist.recv(torch.empty(1), worker.rank + 1, group=gloo)
        dist.send(torch.tensor([100.0 * worker.rank]), 0, group=gloo)
        if worker.rank > 1:
            dist.send(torch.empty(1), worker.rank - 1, group=gloo)
    title = "4. Tags 7, 8 sent in this order, received as 8, 7; a receive from any source (Gloo)"
    print_by_rank(worker, title, received_by_tag=tagged, sender_and_number=anyone)


def ring_shift(tensor: torch.Tensor, group=None) -> torch.Tensor:
    """The left neighbour's tensor (of the same shape), while ours goes to the right one."""
    incoming = torch.empty_like(tensor)
    batch(tensor, incoming, group)
    return incoming


def show_ring_shift(worker: Worker) -> None:
    tensor = torch.tensor([worker.rank], device=worker.device)
    views = [int(tensor)]
    for _ in range(worker.world_size):
        tensor = ring_shift(tensor)
        views.append(int(tensor))
    columns = {f"after_{shift}": value for shift, value in enumerate(views)}
    print_by_rank(worker, "5. Whose value a rank holds after 0, 1, 2, ... ring shifts", **columns)


def heat(cells: torch.Tensor, steps: int, left=None, right=None, group=None) -> torch.Tensor:
    """Cool a rod between two walls of temperature 0: the heat equation, explicit steps, 1-D.

    cells: this rank's piece of the rod. left, right: the ranks (in the group) that hold the pieces
    next to it, or None at a wall; both None is the single-process run. In each step a cell moves
    by a quarter of its difference to each neighbour: u += (u_left - 2 u + u_right) / 4.
    """
    padded = cells.new_zeros(len(cells) + 2)  # this rank's cells, and one halo cell per side
    padded[1:-1] = cells
    for _ in range(steps):
        exchange_halo(padded, left, right, group)
        padded[1:-1] += (padded[:-2] - 2 * padded[1:-1] + padded[2:]) / 4
    return padded[1:-1]


def exchange_halo(padded: torch.Tensor, left, right, group=None) -> None:
    """Send this rank's outermost cells; receive the neighbours' outermost cells into the halo."""
    transfers = []
    for peer, own, halo in ((left, padded[1:2], padded[:1]), (right, padded[-2:-1], padded[-1:])):
        if peer is not None:
            transfers.append(dist.P2POp(dist.isend, own, group=group, group_peer=peer))
            transfers.append(dist.P2POp(dist.irecv, halo, group=group, group_peer=peer))
    for work in dist.batch_isend_irecv(transfers) if transfers else []:
        work.wait()


def part_of(rod: torch.Tensor, rank: int, world_size: int) -> torch.Tensor:
    return rod[rank * len(rod) // world_size : (rank + 1) * len(rod) // world_size]


def collect(part: torch.Tensor, rod: torch.Tensor, worker: Worker) -> None:
    """Gather all pieces, which may differ in length, into `rod` on rank 0."""
    if worker.rank > 0:
        dist.send(part, 0)
        return
    part_of(rod, 0, worker.world_size).copy_(part)
    for source in range(1, worker.world_size):  # the views have the lengths of the messages
        dist.recv(part_of(rod, source, worker.world_size), source)


def show_heat(count: int, steps: int, worker: Worker) -> None:
    rank, size = worker.rank, worker.world_size
    left, right = rank - 1 if rank > 0 else None, rank + 1 if rank < size - 1 else None
    x = torch.arange(1, count + 1, dtype=torch.float64, device=worker.device) / (count + 1)
    start = torch.sin(math.pi * x)
    part = heat(part_of(start, rank, size), steps, left, right)
    rod = torch.empty_like(start)
    collect(part, rod, worker)
    sent = steps * part.element_size() * sum(peer is not None for peer in (left, right))
    title = f"6. Heat equation, {count} cells, {steps} steps, halo exchange"
    print_by_rank(worker, title, cells=len(part), bytes_sent=sent, hottest=part.max().item())
    if worker.is_main:
        alone = heat(start, steps)
        # A sine keeps its shape: each step multiplies it by the same number below one.
        exact = start * math.cos(math.pi / (2 * (count + 1))) ** (2 * steps)
        print(f"same bits as one process: {'yes' if torch.equal(rod, alone) else 'NO'}")
        print(f"largest difference from the formula: {(rod - exact).abs().max().item():.1e}")


def parse_args():
    parser = ArgumentParser(description="Point-to-point communication, from send to halo exchange.")
    add = parser.add_argument
    add("--timeout", type=above(0), default=1.0, help="end the deadlock after X seconds")
    add("--cells", type=at_least(1), default=101, help="cells of the rod, over all ranks")
    add("--steps", type=at_least(1), default=1000, help="time steps of the heat equation")
    add("--device", choices=DEVICES, default="auto", help=DEVICE_HELP)
    return parser.parse_args()


if __name__ == "__main__":
    main()
