"""Eight bugs that make replicas diverge without an error, and the checksum that finds each bug.

    torchrun --standalone --nproc_per_node=2 ddp_basics/silent_divergence.py
    torchrun --standalone --nproc_per_node=3 ddp_basics/silent_divergence.py --case unfrozen
    python ddp_basics/silent_divergence.py                 # one process: nothing can diverge

    past-the-wrapper   the loss comes from ddp_model.module(x)
    unfrozen           a layer is unfrozen after DDP was built
    replaced           a layer is replaced after DDP was built
    static-graph       static_graph=True, and one step that skips a layer
    seed               each rank draws its own initial weights, and DDP is told not to broadcast
    batchnorm          each rank keeps the running statistics of its own batches
    local-skip         a rank skips an optimizer step because its own loss is high
    local-schedule     the learning rate follows each rank's own loss

DDP averages gradients. It never compares parameters: replicas stay equal only because they start
equal and make the same steps. In each table, look at the losses: they fall on every rank and look
right. Then look at the test accuracy, which all ranks measure on the same images: the ranks no
longer hold the same model. Below the table is the message of `check_replicas` (replicas.py). It
compares one checksum per rank, so a training script can afford it at every logged step. The last
lines show the fix, and what check_replicas then reports.
"""

from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from arguments import DEVICE_HELP, DEVICES, ArgumentParser, UserError, at_least
from replicas import average_buffers, check_replicas
from runtime import Worker, distributed_worker
from small_net import (
    BATCH,
    accuracy,
    batches,
    make_model,
    make_optimizer,
    mean_over_ranks,
    train_step,
)
from torch import nn
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn.parallel import DistributedDataParallel


@record
def main() -> None:
    args = parse_args()
    with distributed_worker(args.device) as worker:
        if BATCH % worker.world_size:
            raise UserError(
                f"the global batch of {BATCH} images does not divide over "
                f"{worker.world_size} rank(s)"
            )
        if worker.is_main and worker.world_size == 1:
            print("one rank alone cannot diverge: start two or more with torchrun")
        ended = {}
        for name in CASES if args.case == "all" else [args.case]:
            wrong = run(CASES[name], False, args.steps, worker)
            cured = run(CASES[name], True, args.steps, worker)
            report(name, wrong, cured, worker)
            ended[name] = cured["state"]
        if args.output and worker.is_main:
            torch.save(ended, args.output)


# ---- the cases: generators that yield (the model, this rank's loss) after each step


def past_the_wrapper(steps: int, cured: bool, worker: Worker) -> Iterator:
    """The loss comes from ddp_model.module(x), or from one of its methods: DDP sees no forward.

    Cure: call ddp_model(x) only, and let an argument of forward() choose what it computes.
    """
    model = make_model(worker)
    ddp_model = DistributedDataParallel(model)
    optimizer = make_optimizer(model)
    forward = ddp_model if cured else ddp_model.module
    for images, labels in batches(steps, worker):
        yield model, train_step(forward, optimizer, images, labels)


def unfrozen(steps: int, cured: bool, worker: Worker) -> Iterator:
    """A layer is unfrozen after DDP was built: DDP averages only what was trainable before.

    Cure: wrap again after every change of requires_grad.
    """
    model = make_model(worker)
    model.body.requires_grad_(False)
    ddp_model = DistributedDataParallel(model)
    optimizer = make_optimizer(model)  # it skips parameters without a gradient
    for step, (images, labels) in enumerate(batches(steps, worker)):
        if step == steps // 2:
            model.body.requires_grad_(True)
            if cured:
                ddp_model = DistributedDataParallel(model)
        yield model, train_step(ddp_model, optimizer, images, labels)


def replaced(steps: int, cured: bool, worker: Worker) -> Iterator:
    """The head is replaced after DDP was built: DDP waits for the gradients of the old head.

    find_unused_parameters=True hides the bug. Without it, DDP raises an error in the next step. (A
    buffer may be replaced: DDP looks for the buffers before each forward.)
    Cure: change the model first, then wrap it.
    """
    model = make_model(worker)
    new_head = nn.Linear(32, 10).to(worker.device)  # equal on all ranks: one seed
    if cured:
        model.head = new_head
    ddp_model = DistributedDataParallel(model, find_unused_parameters=not cured)
    model.head = new_head
    optimizer = make_optimizer(model)
    for images, labels in batches(steps, worker):
        yield model, train_step(ddp_model, optimizer, images, labels)


def static_graph(steps: int, cured: bool, worker: Worker) -> Iterator:
    """With static_graph=True, every second step of the second half skips a layer on all ranks.

    DDP waits for the gradients that the first step had. It does not start the all_reduce of a
    bucket that is not full, and raises an error only in the step after. It also overrides
    find_unused_parameters=True.
    Cure: find_unused_parameters=True without static_graph.
    """
    model = make_model(worker)
    options = {"find_unused_parameters": True} if cured else {"static_graph": True}
    ddp_model = DistributedDataParallel(model, **options)
    optimizer = make_optimizer(model)
    for step, (images, labels) in enumerate(batches(steps, worker)):
        model.skip_extra = step >= steps // 2 and step % 2 == 1
        yield model, train_step(ddp_model, optimizer, images, labels)


def seed(steps: int, cured: bool, worker: Worker) -> Iterator:
    """Each rank draws its own initial weights, and DDP is told not to broadcast rank 0's.

    The same happens if you average gradients by hand, without DDP's constructor.
    Cure: keep init_sync=True, or load the same checkpoint on every rank first.
    """
    torch.manual_seed(worker.rank)
    model = make_model(worker)
    ddp_model = DistributedDataParallel(model, init_sync=cured)
    optimizer = make_optimizer(model)
    for images, labels in batches(steps, worker):
        yield model, train_step(ddp_model, optimizer, images, labels)


def batchnorm(steps: int, cured: bool, worker: Worker) -> Iterator:
    """Each rank keeps the running statistics of its own batches: parameters agree, buffers do not.

    DDP broadcasts rank 0's buffers before each forward, so after a step each rank has its own. A
    model in eval() mode uses them: ranks that share the test images use different models.
    Cure: average_buffers(model) before each evaluation and save, SyncBatchNorm on GPUs, GroupNorm.
    """
    model = make_model(worker, norm=nn.BatchNorm1d(32))
    ddp_model = DistributedDataParallel(model)
    optimizer = make_optimizer(model)
    for images, labels in batches(steps, worker):
        loss = train_step(ddp_model, optimizer, images, labels)
        if cured:
            average_buffers(model)
        yield model, loss


def local_skip(steps: int, cured: bool, worker: Worker) -> Iterator:
    """A rank skips an optimizer step because its own loss is high: part of a batch is mislabelled.

    (A rank that skips backward() as well makes the other ranks wait: a hang, not a divergence.)
    Cure: decide by a number that all ranks share, such as the averaged loss.
    """
    model = make_model(worker)
    ddp_model = DistributedDataParallel(model)
    optimizer = make_optimizer(model)
    limit = float("inf")
    for images, labels in batches(steps, worker, mislabelled=3 * steps // 4):
        optimizer.zero_grad()
        loss = F.cross_entropy(ddp_model(images), labels)
        loss.backward()
        seen = mean_over_ranks(loss, worker) if cured else loss.item()
        if seen <= limit:
            optimizer.step()
            limit = 1.1 * seen
        yield model, loss.item()


def local_schedule(steps: int, cured: bool, worker: Worker) -> Iterator:
    """The learning rate follows each rank's own loss: a scheduler is state that ranks must share.

    Cure: give the scheduler a number that all ranks share, such as the averaged loss.
    """
    model = make_model(worker)
    ddp_model = DistributedDataParallel(model)
    optimizer = make_optimizer(model)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
    for images, labels in batches(steps, worker):
        optimizer.zero_grad()
        loss = F.cross_entropy(ddp_model(images), labels)
        loss.backward()
        optimizer.step()
        scheduler.step(mean_over_ranks(loss, worker) if cured else loss.item())
        yield model, loss.item()


ALL = (
    past_the_wrapper,
    unfrozen,
    replaced,
    static_graph,
    seed,
    batchnorm,
    local_skip,
    local_schedule,
)
CASES = {case.__name__.replace("_", "-"): case for case in ALL}


# ---- run a case, report it


def run(case: Callable, cured: bool, steps: int, worker: Worker) -> dict:
    """Train, and compare the replicas after each step."""
    torch.manual_seed(0)
    losses, difference, error, model = [], None, None, None
    try:
        for model, loss in case(steps, cured, worker):
            losses.append(loss)
            try:
                check_replicas(model, len(losses), worker)
            except UserError as found:  # a training script stops here; this one goes on
                difference = difference or ": ".join(str(found).split(": ")[:2])
    except RuntimeError as raised:  # DDP's own error, on all ranks
        error = f"step {len(losses) + 1}: {str(raised).partition('. ')[0]}"
    return {
        "losses": losses,
        "accuracy": accuracy(model, worker),
        "difference": difference,
        "error": error,
        "state": {name: tensor.cpu() for name, tensor in model.state_dict().items()},
    }


def report(name: str, wrong: dict, cured: dict, worker: Worker) -> None:
    own = (wrong["losses"], wrong["accuracy"])
    by_rank = [None] * worker.world_size
    dist.all_gather_object(by_rank, own)
    if not worker.is_main:
        return
    story = " ".join(CASES[name].__doc__.split())
    title, cure = story.partition(". ")[0], story.partition("Cure: ")[2].rstrip(".")
    print(f"\n{name}: {title}")
    print("rank  loss of step 1  of the last step  test accuracy")
    for rank, (losses, share) in enumerate(by_rank):
        print(f"{rank:4}  {losses[0]:14.3f}  {losses[-1]:16.3f}  {share:13.2%}")
    print(f"check_replicas says: {wrong['difference'] or 'no difference'}")
    if wrong["error"]:
        print(f"DDP says later: {wrong['error']}")
    held = cured["difference"] or cured["error"] or f"equal bits on {worker.world_size} rank(s)"
    print(f"fix: {cure}")
    print(f"with the fix: {held} after each of {len(cured['losses'])} steps")


def parse_args():
    parser = ArgumentParser(description="Planted faults that make replicas diverge silently.")
    parser.add_argument(
        "--case", choices=("all", *CASES), default="all", help="fault to plant (default: all)"
    )
    parser.add_argument(
        "--steps", type=at_least(4), default=20, help="optimizer steps per case (default: 20)"
    )
    parser.add_argument("--output", type=Path, help="save the cured models to this file")
    parser.add_argument("--device", choices=DEVICES, default="auto", help=DEVICE_HELP)
    return parser.parse_args()


if __name__ == "__main__":
    main()
