"""Trace one all_reduce from the script to the sockets, and how the ranks met before it.

    torchrun --standalone --nproc_per_node=2 custom_backend/layers.py
    torchrun --standalone --nproc_per_node=2 custom_backend/layers.py --picture layers.png

Each printed line is a call that was recorded in this run. Look at

1. which rank waits for which key in the store, and how few bytes connect two processes.
2. how many layers a call passes. Only the last one sends, in a thread of the backend.
3. the files that implement these layers.
"""

import os
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from arguments import DEVICE_HELP, DEVICES, ArgumentParser, at_least
from recording_store import RecordingStore
from runtime import choose_backend, choose_device, leave, meeting_point
from sequence import Message, draw, now, print_sequence
from source_map import print_map
from spies import print_objects, watch_all_reduce
from torch.distributed.elastic.multiprocessing.errors import record

TIMEOUT = timedelta(minutes=5)


@record
def main() -> None:
    args = parse_args()
    store, meeting, device = meet(args.device)  # hold the store: NCCL asks it again later
    if dist.get_rank() == 0:
        print(f"{dist.get_world_size()} rank(s) on {device.type}, {dist.get_backend()}")
    tensor = torch.ones(args.elements, device=device)
    # The first call looks up much that later calls find cached.
    watch_all_reduce(tensor, dist.PrefixStore("first", store))
    call = watch_all_reduce(tensor, dist.PrefixStore("again", store))
    unwatched = time_all_reduce(tensor)
    meetings = [None] * dist.get_world_size()
    dist.all_gather_object(meetings, meeting)
    if dist.get_rank() == 0:
        everyone = [message for messages in meetings for message in messages]
        title_1 = "1. init_process_group, all ranks"
        title_2 = f"2. dist.all_reduce of {tensor.nbytes:,} bytes, rank 0"
        print_sequence(title_1, everyone)
        print_sequence(title_2, call)
        print_objects(device)
        print(f"An unrecorded call takes {1e6 * unwatched:.0f} us, including wait().")
        print_map()
        if args.picture:
            draw({title_1: everyone, title_2: call}, args.picture)
    leave()


def meet(device: str) -> tuple[dist.Store, list[Message], torch.device]:
    """Join the job; return the store, the messages between this rank and it, and the device."""
    launched = "RANK" in os.environ  # by torchrun; else a job of one rank
    rank = int(os.environ["RANK"]) if launched else 0
    size = int(os.environ["WORLD_SIZE"]) if launched else 1
    me = f"rank {rank}"
    started = time.perf_counter()
    store = meeting_point(TIMEOUT) if launched else dist.HashStore()
    took = time.perf_counter() - started
    where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}" if launched else "itself"
    found = Message(started, me, "store", f"rendezvous: connect to {where}", took)

    place = choose_device(device, store, rank, size)
    if place.type != "cpu":
        torch.accelerator.set_device_index(place.index)
    backend = choose_backend(None, place.type)
    recording = RecordingStore(store, me)
    call = now(me, me, f'init_process_group("{backend}")')
    dist.init_process_group(backend, store=recording, rank=rank, world_size=size, timeout=TIMEOUT)
    back = now(me, me, f"joined, {1e6 * (time.perf_counter() - call.at):,.0f} us later")
    return recording, [found, call, *recording.messages, back], place


def time_all_reduce(tensor: torch.Tensor, repeats: int = 20) -> float:
    """The median time of one call, in seconds."""
    seconds = []
    for _ in range(repeats):
        started = time.perf_counter()
        dist.all_reduce(tensor)
        if tensor.device.type != "cpu":
            torch.accelerator.synchronize()
        seconds.append(time.perf_counter() - started)
    return sorted(seconds)[repeats // 2]


def parse_args():
    parser = ArgumentParser(description="Trace one all_reduce from the script to the sockets.")
    add = parser.add_argument
    add("--elements", type=at_least(1), default=1000, help="fp32 elements of the all_reduce")
    add(
        "--picture", type=Path, metavar="FILE", help="draw the messages to FILE, such as layers.png"
    )
    add("--device", choices=DEVICES, default="auto", help=DEVICE_HELP)
    return parser.parse_args()


if __name__ == "__main__":
    main()
