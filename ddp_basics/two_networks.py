"""Train a GAN under DDP, two networks with two optimizers in alternation: right and wrong ways.

    python ddp_basics/two_networks.py
    torchrun --standalone --nproc_per_node=2 ddp_basics/two_networks.py
    torchrun --standalone --nproc_per_node=3 ddp_basics/two_networks.py --steps 20

Each step trains the discriminator on real and generated digits, then the generator through the
discriminator. `train` does it right: one wrapper per network, and the discriminator frozen while
the generator learns. Each other row of the table changes one thing. Look at

- the differences to one process that trains on the global batch: the largest over all steps,
  networks and ranks, for the gradients and for the final parameters. A wrong row ends without an
  error;
- the gradient bytes that each rank passes to all_reduce in a step. The generator's loss has
  gradients for both networks. If the discriminator is not frozen, its wrapper averages them, and
  they stay in .grad until zero_grad() is called right before the discriminator's next backward;
- the rows that end with DDP's error: a wrapper waits for all gradients of its module, or for none.

The second table is about buffers. DDP copies rank 0's buffers to the other ranks before each
forward. If two forwards precede one backward, as for real and generated images, the second changes
the buffers that the first saved for backward, without an error (torch 2.11: autograd raises one).
Cures: one forward for both, or forward_sync_buffers=False (older: broadcast_buffers=False, which
leaves out the first copy, too); then the ranks' statistics differ.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from arguments import DEVICE_HELP, DEVICES, ArgumentParser, UserError, at_least
from data import load_dataset
from runtime import Worker, distributed_worker
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn.parallel import DistributedDataParallel

NOISE = 16  # size of the generator's input


@record
def main() -> None:
    args = parse_args()
    with distributed_worker(args.device) as worker:
        if args.batch_size % worker.world_size:
            raise UserError(
                f"--batch-size {args.batch_size} does not divide over {worker.world_size} rank(s)"
            )
        expected = train_alone(args, worker)
        if worker.is_main:
            print("                               difference from one process    gradient bytes")
            print("way                              gradients    parameters      per rank, step")
        for name, way in WAYS.items():
            result = attempt(way, args, worker)
            print_row(name, result, expected, worker)
            if args.output and worker.is_main and way is train:
                torch.save(result, args.output)
        compare_forwards(worker)


def train(args, worker: Worker, freeze: str = "discriminator", past_the_wrapper: str = "") -> dict:
    """Alternating steps, one wrapper per network. The table varies the keywords."""
    generator, discriminator = make_networks(worker)
    ddp_generator = DistributedDataParallel(generator)  # waits for the generator's gradients only
    ddp_discriminator = DistributedDataParallel(discriminator)
    generate = generator if past_the_wrapper == "generator" else ddp_generator
    judge = discriminator if past_the_wrapper == "discriminator" else ddp_discriminator
    log = Log(ddp_generator, ddp_discriminator)
    g_optimizer, d_optimizer = make_optimizer(generator), make_optimizer(discriminator)
    to_freeze = {"discriminator": discriminator, "first layer": discriminator[0]}.get(freeze)
    for real, noise in local_batches(args, worker):
        # The discriminator's step. detach(): its loss sends no gradient to the generator.
        fake = generate(noise).detach()
        d_optimizer.zero_grad()
        loss = F.softplus(-ddp_discriminator(real)) + F.softplus(ddp_discriminator(fake))
        loss.mean().backward()
        log.gradients(discriminator)
        d_optimizer.step()

        # The generator's step. A frozen discriminator passes gradients on and stores none, so its
        # wrapper has nothing to average.
        g_optimizer.zero_grad()
        with frozen(to_freeze):
            F.softplus(-judge(generate(noise))).mean().backward()
        log.gradients(generator)
        g_optimizer.step()
    return log.result(generator, discriminator)


@contextmanager
def frozen(module: nn.Module | None) -> Iterator[None]:
    """Inside the block, the parameters of `module` get no gradients."""
    if module is not None:
        module.requires_grad_(False)
    yield
    if module is not None:
        module.requires_grad_(True)


def train_in_one_wrapper(args, worker: Worker, **options) -> dict:
    """Both networks in one module under one wrapper, whose forward() computes either loss."""
    both = Both(*make_networks(worker))
    ddp_both = DistributedDataParallel(both, **options)
    log = Log(ddp_both)
    g_optimizer, d_optimizer = make_optimizer(both.generator), make_optimizer(both.discriminator)
    for real, noise in local_batches(args, worker):
        d_optimizer.zero_grad()
        ddp_both(noise, real).backward()
        log.gradients(both.discriminator)
        d_optimizer.step()
        g_optimizer.zero_grad()
        ddp_both(noise).backward()
        log.gradients(both.generator)
        g_optimizer.step()
    return log.result(both.generator, both.discriminator)


class Both(nn.Module):
    def __init__(self, generator: nn.Module, discriminator: nn.Module):
        super().__init__()
        self.generator, self.discriminator = generator, discriminator

    def forward(self, noise: Tensor, real: Tensor | None = None) -> Tensor:
        """The discriminator's loss if there are real images, else the generator's."""
        fake = self.generator(noise)
        if real is None:
            return F.softplus(-self.discriminator(fake)).mean()
        of_real, of_fake = self.discriminator(real), self.discriminator(fake.detach())
        return (F.softplus(-of_real) + F.softplus(of_fake)).mean()


def train_alone(args, worker: Worker) -> dict:
    """The reference: one process trains on the global batch, without a wrapper."""
    generator, discriminator = make_networks(worker)
    log = Log()
    g_optimizer, d_optimizer = make_optimizer(generator), make_optimizer(discriminator)
    for real, noise in global_batches(args):
        real, noise = real.to(worker.device), noise.to(worker.device)
        d_optimizer.zero_grad()
        fake = generator(noise).detach()
        loss = F.softplus(-discriminator(real)) + F.softplus(discriminator(fake))
        loss.mean().backward()
        log.gradients(discriminator)
        d_optimizer.step()
        g_optimizer.zero_grad()
        F.softplus(-discriminator(generator(noise))).mean().backward()
        log.gradients(generator)
        g_optimizer.step()
    return log.result(generator, discriminator)


WAYS: dict[str, Callable] = {
    "two wrappers, frozen": train,
    "not frozen": partial(train, freeze="nothing"),
    "frozen, bare discriminator": partial(train, past_the_wrapper="discriminator"),
    "one wrapper, find_unused": partial(train_in_one_wrapper, find_unused_parameters=True),
    "generator past its wrapper": partial(train, past_the_wrapper="generator"),
    "one layer frozen": partial(train, freeze="first layer"),
    "one wrapper": train_in_one_wrapper,
}


def make_networks(worker: Worker) -> tuple[nn.Sequential, nn.Sequential]:
    """(noise (batch, NOISE) -> images (batch, 64), images -> logits (batch, 1)).

    They have no BatchNorm, which would see only the local batch (see model.py).
    """
    torch.manual_seed(0)
    generator = nn.Sequential(nn.Linear(NOISE, 64), nn.ReLU(), nn.Linear(64, 64), nn.Sigmoid())
    discriminator = nn.Sequential(nn.Linear(64, 64), nn.LeakyReLU(0.2), nn.Linear(64, 1))
    return generator.to(worker.device), discriminator.to(worker.device)


def make_optimizer(network: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.5)


def global_batches(args) -> Iterator[tuple[Tensor, Tensor]]:
    """(real images (batch, 64), noise (batch, NOISE)) of each step, the same on all ranks."""
    images = load_dataset("digits")[0][:][0].flatten(1)
    for step in range(args.steps):
        rows = torch.arange(step * args.batch_size, (step + 1) * args.batch_size) % len(images)
        generator = torch.Generator().manual_seed(step)
        yield images[rows], torch.randn(args.batch_size, NOISE, generator=generator)


def local_batches(args, worker: Worker) -> Iterator[tuple[Tensor, Tensor]]:
    """This rank's local batch of each step: (real images, noise)."""
    for real, noise in global_batches(args):
        mine = slice(worker.rank, None, worker.world_size)
        yield real[mine].to(worker.device), noise[mine].to(worker.device)


class Log:
    """Gradients of each step, and the bytes of gradients that wrappers pass to all_reduce."""

    def __init__(self, *wrappers: DistributedDataParallel):
        self.bytes, self.all_gradients = 0, []
        for wrapper in wrappers:
            wrapper.register_comm_hook(None, self.count)

    def count(self, state, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        self.bytes += bucket.buffer().nbytes
        return default_hooks.allreduce_hook(state, bucket)  # as DDP does without a hook

    def gradients(self, network: nn.Module) -> None:
        self.all_gradients.append([p.grad.detach().cpu().clone() for p in network.parameters()])

    def result(self, generator: nn.Module, discriminator: nn.Module) -> dict:
        return {
            "gradients": self.all_gradients,  # discriminator, generator, discriminator, ...
            "parameters": [
                p.detach().cpu().clone()
                for network in (generator, discriminator)
                for p in network.parameters()
            ],
            "bytes": self.bytes,
        }


def attempt(way: Callable, args, worker: Worker) -> dict:
    try:
        return way(args, worker)
    except RuntimeError as error:  # DDP's own error, on all ranks
        return {"error": str(error).partition(" before starting")[0]}


def print_row(name: str, result: dict, expected: dict, worker: Worker) -> None:
    """All ranks call this; rank 0 prints the largest differences of all ranks."""
    row = result.get("error")
    if row is None:
        pairs = zip(result["gradients"], expected["gradients"], strict=True)
        row = (
            max(max_difference(*pair) for pair in pairs),
            max_difference(result["parameters"], expected["parameters"]),
            result["bytes"],
        )
    rows = [None] * worker.world_size
    dist.all_gather_object(rows, row)
    if not worker.is_main:
        return
    if isinstance(row, str):
        print(f"{name:33}{row}")
        return
    of_gradients, of_parameters, size = (max(column) for column in zip(*rows, strict=True))
    steps = len(result["gradients"]) // 2
    print(f"{name:33}{of_gradients:9.1e}  {of_parameters:12.1e}  {size / steps:18,.0f}")


def max_difference(a: list[Tensor], b: list[Tensor]) -> float:
    return max((x - y).abs().max().item() for x, y in zip(a, b, strict=True))


# ---- buffers


class RunningScale(nn.Module):
    """Divides by a running mean of |x|, as some discriminators do. Autograd saves the mean."""

    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        self.scale = 0.5 * self.scale + 0.5 * x.detach().abs().mean()
        return x / self.scale


def compare_forwards(worker: Worker) -> None:
    """The scale that a rank used in its first forward, and the one that its backward uses."""
    row = []
    for together in (False, True):
        network = nn.Sequential(RunningScale(), nn.Linear(1, 1)).to(worker.device)
        nn.init.ones_(network[1].weight)
        ddp_network = DistributedDataParallel(network)
        # Each rank has its own data, so the ranks' scales differ after a forward.
        real = torch.full((1, 1), 1.0 + worker.rank, device=worker.device, requires_grad=True)
        fake = 2 * real.detach()
        if together:
            loss = ddp_network(torch.cat([real, fake])).sum()
            used = network[0].scale.item()
        else:
            loss = ddp_network(real).sum()
            used = network[0].scale.item()
            loss = loss + ddp_network(fake).sum()
        try:
            loss.backward()
            used_by_backward = (
                f"{1 / real.grad.item():.3f}"  # the gradient of x / scale is 1 / scale
            )
        except RuntimeError:  # torch 2.11: autograd sees that the buffer was changed
            used_by_backward = "error"
        row += [f"{used:.3f}", used_by_backward]
    rows = [None] * worker.world_size
    dist.all_gather_object(rows, row)
    if worker.is_main:
        print("\nscale of the real   two forwards          one forward for both")
        print("images, by rank     forward   backward    forward   backward")
        for rank, values in enumerate(rows):
            print(f"{rank:15}" + "".join(f"{value:>11}" for value in values))


def parse_args():
    parser = ArgumentParser(description="Train a GAN with DDP in several ways, right and wrong.")
    add = parser.add_argument
    add("--steps", type=at_least(2), default=10, help="steps per way and network (default: 10)")
    add("--batch-size", type=at_least(1), default=48, help="images per global batch (default: 48)")
    add("--output", type=Path, help="save gradients and parameters of the first way")
    add("--device", choices=DEVICES, default="auto", help=DEVICE_HELP)
    return parser.parse_args()


if __name__ == "__main__":
    main()
