"""A model split over two devices inside each replica, and the replicas under DDP.

    torchrun --standalone --nproc_per_node=2 ddp_basics/ddp_with_model_parallel.py
    torchrun --standalone --nproc_per_node=2 ddp_basics/ddp_with_model_parallel.py --device cuda
    python ddp_basics/ddp_with_model_parallel.py                              # one replica

For a model that one GPU cannot hold: the first half lives on one, the second on another, and the
activations travel between them. Rank r takes the GPUs 2r and 2r + 1 of its node, so --device cuda
needs two per rank; on the CPU the same code runs with both halves there.

Look at where the halves live, and at the differences to the unsplit model in one process: gradients
of the whole global batch, parameters after --steps steps. What no table shows: while one half
computes, the other waits. Pipeline parallelism fills that time; fully_shard needs no split at all.
"""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from arguments import ArgumentParser, UserError
from data import load_dataset
from model import SmallCNN
from runtime import Worker, distributed_worker
from torch import Tensor, nn
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn.parallel import DistributedDataParallel


@record
def main() -> None:
    args = parse_args()
    # "cpu": this gives us the ranks and a Gloo group for the report. It would choose one GPU per
    # rank and tie NCCL to it; we choose two, and make a group for them below.
    with distributed_worker("cpu") as worker:
        if args.batch_size % worker.world_size:
            raise UserError(
                f"--batch-size {args.batch_size} does not divide over {worker.world_size} rank(s)"
            )
        devices = choose_devices(args.device, worker)
        group = dist.new_group(backend="nccl") if devices[0].type == "cuda" else None
        train(devices, group, args, worker)


def choose_devices(device: str, worker: Worker) -> tuple[torch.device, torch.device]:
    """The devices of this rank's two halves. Raises `UserError` where --device cuda cannot be."""
    ranks, gpus = int(os.environ.get("LOCAL_WORLD_SIZE", 1)), torch.cuda.device_count()
    if device == "cuda" and gpus < 2 * ranks:
        raise UserError(
            f"--device cuda needs two GPUs per rank: {ranks} rank(s), {gpus} GPU(s) here"
        )
    if device == "cpu" or gpus < 2 * ranks:
        return torch.device("cpu"), torch.device("cpu")
    first = 2 * worker.local_rank  # the global rank would be wrong on the second node
    torch.cuda.set_device(first)  # else every rank would also start a context on GPU 0
    return torch.device("cuda", first), torch.device("cuda", first + 1)


class TwoHalves(nn.Module):
    """SmallCNN, cut in two. Images (batch, 1, 8, 8) -> logits (batch, 10) on the second device."""

    def __init__(self, devices: tuple[torch.device, torch.device]):
        super().__init__()
        layers = SmallCNN().net
        self.devices = devices
        self.first = layers[:8].to(devices[0])
        self.second = layers[8:].to(devices[1])

    def forward(self, images: Tensor) -> Tensor:
        hidden = self.first(images.to(self.devices[0]))
        return self.second(hidden.to(self.devices[1]))  # backward sends the gradient the other way


def train(devices, group, args, worker: Worker) -> None:
    torch.manual_seed(0)
    model = TwoHalves(devices)
    # device_ids=None: DDP moves no inputs and accepts several devices. It makes buckets for each
    # device, and each is averaged with the bucket of the same half on the other ranks.
    ddp_model = DistributedDataParallel(model, device_ids=None, process_group=group)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    torch.manual_seed(0)
    whole = SmallCNN()  # the reference: unsplit, on the CPU, with the whole global batch
    whole_optimizer = torch.optim.SGD(whole.parameters(), lr=0.05, momentum=0.9)

    images, labels = load_dataset("digits")[0][:]
    worst = dict.fromkeys(["first", "second"], 0.0)
    for step in range(args.steps):
        batch = torch.arange(step * args.batch_size, (step + 1) * args.batch_size) % len(images)
        share = batch[worker.rank :: worker.world_size]
        optimizer.zero_grad()
        logits = ddp_model(images[share])
        F.cross_entropy(logits, labels[share].to(logits.device)).backward()
        whole_optimizer.zero_grad()
        F.cross_entropy(whole(images[batch]), labels[batch]).backward()
        for (name, p), q in zip(model.named_parameters(), whole.parameters(), strict=True):
            half = name.split(".")[0]
            worst[half] = max(worst[half], (p.grad.cpu() - q.grad).abs().max().item())
        optimizer.step()
        whole_optimizer.step()
    report(model, whole, worst, args, worker)


def report(model: TwoHalves, whole: SmallCNN, worst: dict, args, worker: Worker) -> None:
    pairs = zip(model.parameters(), whole.parameters(), strict=True)
    parameters = max((p.detach().cpu() - q.detach()).abs().max().item() for p, q in pairs)
    halves = [(name, list(getattr(model, name).parameters())) for name in worst]
    rows = [
        (name, ", ".join({str(p.device) for p in ps}), sum(p.numel() for p in ps), worst[name])
        for name, ps in halves
    ]
    everyone = [None] * worker.world_size
    dist.all_gather_object(everyone, (rows, parameters))
    if not worker.is_main:
        return
    print("rank  half    lives on  parameters  max difference of gradients")
    for rank, (rows, _) in enumerate(everyone):
        for name, place, count, difference in rows:
            print(f"{rank:4}  {name:6}  {place:8}  {count:10,}  {difference:27.1e}")
    parameters = max(parameters for _, parameters in everyone)
    print(f"max difference of parameters after {args.steps} steps: {parameters:.1e}")


def parse_args():
    parser = ArgumentParser(description="DDP over replicas that live on two devices each.")
    add = parser.add_argument
    add("--steps", type=int, default=5)
    add("--batch-size", type=int, default=48, help="images per step, over all ranks")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="cuda: 2 GPUs per rank")
    args = parser.parse_args()
    for name in ("steps", "batch_size"):
        if getattr(args, name) < 1:
            flag = "--" + name.replace("_", "-")
            parser.error(f"{flag} must be at least 1, not {getattr(args, name)}")
    return args


if __name__ == "__main__":
    main()
