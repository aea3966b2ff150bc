"""What is wrong with a training, in one sentence: each function raises NotYet, or returns.

A run is what observe.py has recorded. Points are named by their index in the data set.
"""

import re
from collections import Counter
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from one_process import BATCH, Net, Spirals
from oracle import LEARNING_RATE, Weights, correct, far, flat, gradient, momentum_step, times

TRAIN, TEST = Spirals(250, seed=1, unlabelled=0.4), Spirals(100, seed=2)
STEPS = len(TRAIN) // BATCH  # of an epoch
X, Y = TRAIN.x.numpy().astype(float), TRAIN.y.numpy()
SHAPES = {name: tuple(t.shape) for name, t in Net(TRAIN.x, 0).state_dict().items()}
BUFFERS = {"mean": X.mean(axis=0), "std": X.std(axis=0, ddof=1)}


class NotYet(Exception):
    """The text is one sentence about one mistake."""


def wrong_if(mistake, sentence: str) -> None:
    if mistake:
        raise NotYet(sentence)


@dataclass
class Run:
    ranks: int
    status: int | None  # of torchrun; None: it did not end in time
    output: str
    records: list[list[tuple]]  # of each rank: (kind, value)
    waits: str = ""  # where each rank was when the time was over

    def of(self, rank: int, kind: str) -> list:
        return [value for k, value in self.records[rank] if k == kind]

    @cached_property
    def steps(self) -> list[list[dict]]:
        """The steps that all ranks have made; of each a list in rank order."""
        made = zip(*(self.of(rank, "step") for rank in range(self.ranks)), strict=False)
        return [list(step) for step in made]

    @cached_property
    def points(self) -> list[list[list[int]]]:
        """step -> rank -> the points that it took."""
        return [[indices(TRAIN, each["x"]) for each in step] for step in self.steps]


def indices(data: Spirals, arrays: list[np.ndarray]) -> list[int]:
    """The points that Net got in training mode (of TRAIN), or in evaluation mode (of TEST)."""
    found = places(data, arrays)
    if None not in found:
        return found
    in_other = places(TEST if data is TRAIN else TRAIN, arrays)
    wrong_if(
        any(pair == (None, None) for pair in zip(found, in_other, strict=True)),
        "Net gets points that are in neither set: leave Net's input",
    )
    wrong_if(data is TEST, "Net gets training points in the test: give it those of test_set")
    raise NotYet("Net gets test points in training mode: call net.eval() before the test")


def places(data: Spirals, arrays: list[np.ndarray]) -> list[int | None]:
    """The index of each point in the data set; None if it is not there."""
    index = {x.numpy().tobytes(): i for i, x in enumerate(data.x)}
    return [index.get(x.tobytes()) for array in arrays for x in array.astype(np.float32)]


def ended(run: Run) -> None:
    """Did the script end by itself, without an error?"""
    raised = [
        (when, rank, text) for rank in range(run.ranks) for when, text in run.of(rank, "raised")
    ]
    if raised:
        _, rank, text = min(raised)
        raise NotYet(f"rank {rank} raises {text}")
    counts = [len(run.of(rank, "step")) for rank in range(run.ranks)]
    wrong_if(run.status is None, f"no end in time: {run.waits or 'the ranks wait for each other'}")
    wrong_if(run.status, f"exit status {run.status}: {last_line(run.output)}")
    wrong_if(
        not any(counts),
        "the script trains no Net: no step of an optimizer was seen after a call of Net",
    )
    wrong_if(len(set(counts)) > 1, f"the ranks make unequal numbers of steps: {counts}")


def last_line(output: str) -> str:
    """The last line that names an error, or the last line."""
    lines = [line for line in output.splitlines() if line.strip()] or ["it printed nothing"]
    errors = [line for line in lines if re.search(r"\w*(Error|Exception)\b: ", line)]
    return re.sub(r"^\[rank\d+\]: *", "", (errors or lines)[-1].strip())[:200]


def samples(run: Run) -> None:
    """Do the ranks share each batch, and the data of each epoch?"""
    for number, ranks in enumerate(run.points, 1):
        for rank in (rank for rank, taken in enumerate(ranks) if not taken):
            arrays = evaluated(run, rank, number - 1)
            wrong_if(
                any(place is not None for place in places(TRAIN, arrays)),
                f"step {number}: Net is in evaluation mode: call net.train() in each epoch",
            )
            raise NotYet(
                f"step {number}: rank {rank} calls Net on no points: call net(x), or the network "
                "that wraps it, and not net.forward(x)"
            )
        same = run.ranks > 1 and all(sorted(each) == sorted(ranks[0]) for each in ranks)
        wrong_if(
            same,
            "all ranks train on the same points: give the DataLoader a DistributedSampler, "
            "which gives each rank its own",
        )
        size = sum(map(len, ranks))
        wrong_if(
            size == BATCH * run.ranks != BATCH,
            f"a step takes {size} points, and {BATCH} in one process: "
            f"each rank takes {BATCH} divided by the number of ranks",
        )
        wrong_if(
            size != BATCH, f"step {number} takes {size} points, not {BATCH}: keep drop_last=True"
        )
    epochs = [run.points[at : at + STEPS] for at in range(0, len(run.points), STEPS)]
    for epoch, batches in enumerate(epochs):
        taken = Counter(i for ranks in batches for each in ranks for i in each)
        twice = sum(count > 1 for count in taken.values())
        wrong_if(
            twice,
            f"{twice} points come more than once in an epoch: the shards of the ranks overlap; "
            "all ranks must shuffle alike, as DistributedSampler does",
        )
        wrong_if(
            epoch and batches == epochs[0][: len(batches)],
            "each epoch takes the points in the same order: call sampler.set_epoch(epoch)",
        )


def start(run: Run) -> None:
    """Do the ranks begin with equal weights, and the buffers of one process?"""
    for rank, step in enumerate(run.steps[0]):
        shapes = {name: w.shape for name, w in (step["before"] | step["buffers"]).items()}
        wrong_if(shapes != SHAPES, "this is another Net than that of one_process.py")
        for name, expected in BUFFERS.items():
            wrong_if(
                far({name: step["buffers"][name]}, {name: expected}),
                f"the buffer {name} on rank {rank} is not that of all training points: "
                "a rank must not compute it of its own shard",
            )
        wrong_if(
            far(step["before"], run.steps[0][0]["before"]),
            f"rank {rank} begins with other weights than rank 0: DistributedDataParallel sends "
            "those of rank 0, equal seeds do it too",
        )


def gradients(run: Run) -> None:
    """Is each gradient that of the mean loss of the batch of all ranks?"""
    before = None
    for number, (step, points) in enumerate(zip(run.steps, run.points, strict=True), 1):
        found = [each["gradients"] for each in step]
        for rank, each in enumerate(found):
            for name, g in each.items():
                wrong_if(g is None, f"step {number}: {name} has no gradient on rank {rank}")
        expected, mistake = expectations(step[0]["before"], points)
        if any(far(each, found[0]) for each in found):
            raise NotYet(
                f"step {number}: each rank has a gradient of its own: wrap Net in "
                "DistributedDataParallel, and call the wrapped one in training"
            )
        if not far(found[0], expected):
            before = found[0]
            continue
        for sentence, wrong in mistake.items():
            wrong_if(not far(found[0], wrong), f"step {number}: {sentence}")
        if before:
            added = {name: g + before[name] for name, g in expected.items()}
            wrong_if(
                not far(found[0], added), f"step {number}: the gradient of the step before is added"
            )
        factor = times(found[0], expected)
        if factor:
            raise NotYet(
                f"step {number}: the gradient is {factor:.3g} times that of one process: "
                "the loss is divided by the wrong count"
            )
        off = np.linalg.norm(flat(found[0]) - flat(expected)) / np.linalg.norm(flat(expected))
        raise NotYet(f"step {number}: the gradient differs by {off:.0%} from that of one process")


def expectations(weights: Weights, points: list[list[int]]) -> tuple[Weights, dict[str, Weights]]:
    """The right gradient, and: sentence about a mistake -> the gradient that it leads to."""
    ranks, everything = len(points), [i for each in points for i in each]
    labels = [int((Y[each] >= 0).sum()) for each in points]
    right = gradient(weights, BUFFERS, X[everything], Y[everything], sum(labels))
    if ranks == 1:
        return right, {}
    local = [
        gradient(weights, BUFFERS, X[each], Y[each], max(count, 1))
        for each, count in zip(points, labels, strict=True)
    ]
    of_means = {name: sum(each[name] for each in local) / ranks for name in right}
    counts = " and ".join(map(str, labels))
    return right, {
        f"the gradient is the sum over the ranks, {ranks} times that of one process: "
        "take the mean": {name: ranks * g for name, g in right.items()},
        f"the gradient is 1/{ranks} of that of one process: DistributedDataParallel divides by "
        f"{ranks} although the loss is already divided by the count of all ranks": {
            name: g / ranks for name, g in right.items()
        },
        f"the loss is divided by the wrong count, that of the rank alone: the ranks have {counts} "
        f"points with a label, so divide the sum of all ranks by {sum(labels)}": of_means,
        "the gradient is the sum of the ranks' means: take the mean over all labelled points": {
            name: ranks * g for name, g in of_means.items()
        },
    }


def weights(run: Run, velocity: Weights | None = None) -> list[Weights]:
    """Does each step move the weights as SGD with momentum does, and on all ranks alike?

    velocity: before the first step; None: 0. Returns the velocity after each step.
    """
    velocities = [velocity or {name: 0.0 for name in run.steps[0][0]["before"]}]
    for number, step in enumerate(run.steps, 1):
        for rank, each in enumerate(step):
            wrong_if(
                far(each["after"], step[0]["after"], 1e-6),
                f"after step {number} rank {rank} has other weights than rank 0",
            )
        velocities.append(momentum_step(velocities[-1], step[0]["gradients"]))
        moved = {name: step[0]["after"][name] - w for name, w in step[0]["before"].items()}
        expected = {name: -LEARNING_RATE * v for name, v in velocities[-1].items()}
        if far(moved, expected, 1e-3):  # the difference of two fp32 weights has fewer digits
            factor = times(moved, expected)
            what = f"{factor:.3g} times as far as" if factor else "otherwise than"
            raise NotYet(
                f"step {number} moves the weights {what} one process: keep SGD, its learning "
                "rate and its momentum"
            )
    return velocities[1:]


def evaluation(run: Run, first_epoch: int = 0) -> None:
    """Is the printed accuracy that of all test points, printed once?"""
    printed = Counter(re.findall(r"epoch (\d+): accuracy ([\d.]+)", run.output))
    for epoch in range(len(run.steps) // STEPS):
        name = first_epoch + epoch + 1
        values = [float(value) for number, value in printed.elements() if int(number) == name]
        wrong_if(not values, f'no line "epoch {name}: accuracy ..." is printed')
        net = run.steps[STEPS * (epoch + 1) - 1][0]["after"]
        right = correct(net, BUFFERS, TEST.x.numpy().astype(float), TEST.y.numpy())
        if any(abs(value - right.mean()) > 1e-4 for value in values):
            raise NotYet(wrong_accuracy(run, name, values, right, tested(run, epoch)))
        wrong_if(
            len(values) > 1, f"epoch {name} is printed {len(values)} times: let rank 0 print alone"
        )


def tested(run: Run, epoch: int) -> list[list[int]]:
    """rank -> the test points that Net got on it after this epoch."""
    return [indices(TEST, evaluated(run, rank, STEPS * (epoch + 1))) for rank in range(run.ranks)]


def evaluated(run: Run, rank: int, after: int) -> list[np.ndarray]:
    """The points that Net got in evaluation mode on a rank, after `after` steps."""
    steps, arrays = 0, []
    for kind, value in run.records[rank]:
        steps += kind == "step"
        if kind == "test" and steps == after:
            arrays.append(value)
    return arrays


def wrong_accuracy(run: Run, epoch: int, values, right: np.ndarray, points) -> str:
    text = f"epoch {epoch}: accuracy {values[0]:.4f} is printed, the network has {right.mean():.4f}"
    counts = Counter(i for each in points for i in each)
    hits = [right[each].sum() for each in points]
    own = [hit / max(len(each), 1) for hit, each in zip(hits, points, strict=True)]

    def says(number: float) -> bool:
        return all(abs(value - number) < 1e-4 for value in values)

    if says(sum(hits) / len(right)) and sum(hits) > right.sum() and min(counts.values()) > 1:
        return f"{text}: each rank tests all points, and the counts of all ranks are added"
    twice = sum(count > 1 for count in counts.values())
    if 0 < twice < len(right):
        return f"{text}: {twice} test points count twice: DistributedSampler repeats some to pad"
    shares = {round(x, 4) for x in (*own, *(hit / len(right) for hit in hits))}
    if run.ranks > 1 and set(values) <= shares:
        few = f"its {len(points[0])} of {len(right)} test points"
        return f"{text}: it is that of one rank, which tests {few}: add the counts of all ranks"
    if says(np.mean(own)):
        return f"{text}: it is the mean of the ranks' accuracies, and their shards differ in size"
    return text
