"""Train cases of parallel_basics' pipelines on 2 and 4 ranks; each rank saves what it found.

Started by test_parallel_basics_pipeline.py as one job of 4 ranks; 2 ranks are a subgroup of it.
A rank has what its own stages have; one process trains the whole model, on rank 0.
"""

import sys
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # workers.place
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "parallel_basics"))

import pipeline_from_scratch as by_hand
import pipeline_parallel as by_torch
import torch
import torch.distributed as dist
from activations import Activations
from compare_pipelines import text_batch
from model import GPT, GPTConfig, cross_entropy
from pipeline_stages import TimerStage, gpt_stage, timer_loss
from pipeline_timelines import Recorder
from workers.place import worker_of_test

CPU = torch.device("cpu")
STEPS, BATCH, LENGTH, SECONDS = 3, 12, 16, 0.02
CONFIG = GPTConfig(block_size=LENGTH, layers=9, heads=2, dim=16)  # 9 divide by no number of stages
OPTIMIZERS = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "adamw": lambda params: torch.optim.AdamW(params, lr=1e-3),
}
COUNTS = {2: (1, 2, 3, 12), 4: (1, 2, 4, 6, 12)}  # ranks -> micro-batches; also fewer than stages
TORCH_COUNTS = {2: (2, 12), 4: (4, 6, 12)}
BY_HAND = [
    (p, name, m, "adamw" if m == p else "sgd")
    for p, counts in COUNTS.items()
    for name in by_hand.SCHEDULES
    for m in counts
]
BY_TORCH = [
    (p, name, m, "adamw" if m == p else "sgd")
    for p, counts in TORCH_COUNTS.items()
    for name in by_torch.SCHEDULES
    for m in counts
]


def build(stage: int = 0, stages: int = 1, device=CPU) -> GPT:
    """GPT-2's initial values are so small that some gradients would be below the tolerance."""
    model = gpt_stage(CONFIG, stage, stages, 0, device)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" not in name:
                parameter.mul_(8)
    return model


def train(models, step, optimizer: str) -> dict:
    """Loss, gradients and parameters of `models` (this rank's stages) in each step.

    All numbers of a step are in one tensor: thousands of small ones take long to save.
    """
    named = [pair for model in models for pair in model.named_parameters()]
    optim = OPTIMIZERS[optimizer]([p for _, p in named])
    steps = []
    for number in range(STEPS):
        optim.zero_grad()
        loss = step(*text_batch(number, BATCH, LENGTH, named[0][1].device))
        gradients = torch.cat([p.grad.flatten() for _, p in named])
        optim.step()
        steps.append((loss, gradients, torch.cat([p.detach().flatten() for _, p in named])))
    return {"sizes": {name: p.numel() for name, p in named}, "steps": steps}


def one_process(optimizer: str) -> dict:
    model = build()

    def step(x, y):
        loss = cross_entropy(model(x), y)
        loss.backward()
        return loss.detach()

    return train([model], step, optimizer)


def run_by_hand(groups, name: str, m: int, optimizer: str, device) -> dict:
    rank, p = dist.get_rank(groups[0]), dist.get_world_size(groups[0])
    model = build(rank, p, device)
    pipeline = by_hand.Pipeline(model, cross_entropy, groups)
    order = by_hand.SCHEDULES[name](rank, p, m)
    found = train([model], lambda x, y: pipeline.step(order, x, y), optimizer)
    return {**found, **what_is_kept([model], lambda *a: pipeline.step(order, *a), device)}


def run_by_torch(group, name: str, m: int, optimizer: str, device) -> dict:
    build_here = partial(build, device=device)
    pipeline = by_torch.Pipeline(name, m, build_here, cross_entropy, device, group)
    found = train(pipeline.models, pipeline.step, optimizer)
    found |= what_is_kept(pipeline.models, pipeline.step, device)
    found["contiguous"] = contiguous_inputs(pipeline, device)
    return found


def what_is_kept(models, step, device) -> dict:
    activations = Activations(*models)
    recorder = Recorder(device, activations)
    step(*text_batch(0, BATCH, LENGTH, device), recorder)
    return {
        "kept": activations.most,
        "left": len(activations.kept),
        "timeline": recorder.timeline,
    }


def contiguous_inputs(pipeline, device) -> list[bool]:
    """Whether each micro-batch of this rank's stages is contiguous, if the batch is a view."""
    found = []

    def note(module, inputs):
        found.append(inputs[0].is_contiguous())

    hooks = [model.register_forward_pre_hook(note) for model in pipeline.models]
    tokens = torch.randint(256, (BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(0))
    tokens = tokens.to(device)
    pipeline.step(tokens[:, :-1], tokens[:, 1:])
    for hook in hooks:
        hook.remove()
    return found


def accumulated(groups, device) -> dict:
    """Gradients of two batches without zero_grad() in between: ours, and those of one process."""
    rank, p = dist.get_rank(groups[0]), dist.get_world_size(groups[0])
    model = build(rank, p, device)
    pipeline = by_hand.Pipeline(model, cross_entropy, groups)
    by_torchs = by_torch.Pipeline(
        "Interleaved1F1B", 4, partial(build, device=device), cross_entropy, device, groups[0]
    )
    whole = build(device=device)
    for number in range(2):
        x, y = text_batch(number, BATCH, LENGTH, device)
        pipeline.step(by_hand.one_f_one_b(rank, p, 4), x, y)
        by_torchs.step(x, y)
        cross_entropy(whole(x), y).backward()
    expected = dict(whole.named_parameters())
    named = [("by hand", pair) for pair in model.named_parameters()]
    named += [("torch", pair) for part in by_torchs.models for pair in part.named_parameters()]
    return {(how, n): (q.grad, expected[n].grad) for how, (n, q) in named}


def in_double(groups, device) -> dict:
    """In float64, with a first stage that trains nothing: gradients, and those of one process."""
    rank, p = dist.get_rank(groups[0]), dist.get_world_size(groups[0])
    model, whole = build(rank, p, device).double(), build(device=device).double()
    model.requires_grad_(rank > 0)
    pipeline = by_hand.Pipeline(model, cross_entropy, groups)
    x, y = text_batch(0, BATCH, LENGTH, device)
    pipeline.step(by_hand.one_f_one_b(rank, p, 4), x, y)
    cross_entropy(whole(x), y).backward()
    expected = dict(whole.named_parameters())
    return {n: (q.grad, expected[n].grad) for n, q in model.named_parameters()}


def timers_by_hand(groups, name: str, m: int, device) -> list[list]:
    """The timelines of this rank in some steps of sleeping stages."""
    rank, p = dist.get_rank(groups[0]), dist.get_world_size(groups[0])
    stage = TimerStage(CONFIG, rank, p, SECONDS, device)
    pipeline = by_hand.Pipeline(stage, timer_loss, groups)
    order = by_hand.SCHEDULES[name](rank, p, m)
    batch, timelines = text_batch(0, m, LENGTH, device), []
    for _ in range(4):
        dist.barrier()
        recorder = Recorder(device)
        pipeline.step(order, *batch, recorder)
        timelines.append(recorder.timeline)
    return timelines[1:]


def main() -> None:
    with worker_of_test(gpu_per_rank=True) as worker:
        torch.save(collect(worker), f"{sys.argv[1]}.{worker.rank}")


def collect(worker) -> dict:
    results, device = {}, worker.device
    for optimizer in OPTIMIZERS if worker.is_main else ():
        results["one process", optimizer] = one_process(optimizer)
    # A rank's number in its group is another one in the job: the last ones.
    groups = {p: by_hand.connect(list(range(4 - p, 4))) for p in COUNTS}
    for p, name, m, optimizer in BY_HAND:
        if worker.rank >= 4 - p:
            results["by hand", p, name, m] = run_by_hand(groups[p], name, m, optimizer, device)
    for p, name, m, optimizer in BY_TORCH:
        if worker.rank >= 4 - p:
            results["by torch", p, name, m] = run_by_torch(groups[p][0], name, m, optimizer, device)
    results["accumulated"] = accumulated(groups[4], device)
    results["double"] = in_double(groups[4], device)
    try:
        by_hand.connect([1, 0])
    except ValueError as error:
        results["not in order"] = str(error)
    for name in by_hand.SCHEDULES:
        results["timers", name] = timers_by_hand(groups[4], name, 4, device)
    dist.barrier()
    return results


if __name__ == "__main__":
    main()
