"""What chapters say next to a printed number or a class, checked by other means."""

import json
import re
import sys
from pathlib import Path

import pool
import pytest
from helpers import ROOT

FOLDER = ROOT / "notebooks"


def cells(chapter: str) -> dict[str, dict]:
    """id -> cell"""
    (path,) = FOLDER.glob(f"{chapter}_*.ipynb")
    return {cell["id"]: cell for cell in json.loads(path.read_text())["cells"]}


def source(chapter: str, cell: str) -> str:
    return "".join(cells(chapter)[cell]["source"])


def printed(chapter: str, cell: str) -> str:
    outputs = cells(chapter)[cell]["outputs"]
    return "".join("".join(output.get("text", "")) for output in outputs)


def run(tmp_path: Path, script: str, ranks: int = 2):
    file = tmp_path / "script.py"
    file.write_text(script)
    return pool.run(file, ranks=ranks, timeout=120)


JOB = """
import time
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

{before}
dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
{after}
dist.barrier()
dist.destroy_process_group()
"""


def test_03_shapes_that_differ_give_a_wrong_sum():
    sums = [json.loads(s) for s in re.findall(r"rank \d: (.*)", printed("03", "cell-51"))]
    flat = [[number for row in rows for number in row] for rows in sums]
    assert flat[0] == flat[1] == flat[2], "the ranks hold one sum"
    assert flat[0] != [3 * k for k in range(1, 7)], "this is the right sum"


@pytest.mark.parametrize(("level", "status"), [("INFO", 0), ("DETAIL", -11)])
def test_03_ddp_crashes_under_detail(tmp_path, level, status):
    """If the last case fails on a newer torch, chapter 03 and collectives/debugging.md change."""
    script = JOB.format(
        before=f"dist.set_debug_level(dist.DebugLevel.{level})",
        after="DistributedDataParallel(nn.Linear(2, 2))",
    )
    assert run(tmp_path, script).returncode == status


BRANCHES = """
class TwoBranches(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Parameter(torch.zeros(4)), nn.Parameter(torch.zeros(4))

    def forward(self):  # the branch that is computed last has its gradient first
        branches = [lambda: self.a.sum(), lambda: 10 * self.b.sum()]
        return sum(branch() for branch in (branches if rank == 0 else branches[::-1]))

model = TwoBranches()
sync = BucketedAverage(model, bucket_bytes=1)
assert len(sync.buckets) == 2
model().backward()
sync.finish()
print(f"rank {rank}: {model.a.grad[0]:g} and {model.b.grad[0]:g}", flush=True)
"""


def test_06_buckets_leave_in_one_order_on_all_ranks(tmp_path):
    """The gradients of the two branches are complete in another order on rank 1."""
    bucketed = source("06", "cell-32").replace("%%px\n", "")
    output = run(tmp_path, JOB.format(before=bucketed, after=BRANCHES)).check().output
    assert "rank 0: 1 and 10" in output


def test_04_no_more_overlaps_than_can():
    """Five of six buckets can travel under computation."""
    saved = re.search(r"overlapped: (-?\d+)% .* at most (\d+)% can be", printed("04", "cost-31"))
    assert int(saved[1]) <= int(saved[2]) == 83


def test_04_the_column_counts_messages_where_they_are_not_steps():
    sys.path.insert(0, str(ROOT / "collectives"))
    from all_reduce_traffic import critical_path

    head, _, *rows = printed("04", "cost-14").splitlines()
    sent = {row.split()[0]: int(row.split()[-1]) for row in rows}
    steps = {name: critical_path(name, 12, 4, 4).steps for name in sent}
    assert head.split()[-3:] == ["messages", "it", "sends"]
    assert (sent["tree"], steps["tree"]) == (2, 4), "as the text below the table says"


def test_05_ratios_of_links_grow_and_that_of_memory_does_not():
    rows = [row.split()[-3:] for row in printed("05", "roof-17").splitlines()[2:6]]
    memory, fast, network = (
        [int(number.replace(",", "")) for number in column] for column in zip(*rows, strict=True)
    )
    assert len(memory) == 4, "A100 to B200"
    assert fast == sorted(fast)
    assert network == sorted(network)
    assert memory != sorted(memory)
    assert ", ".join(map(str, memory)) in source("05", "roof-18")


def test_05_no_operation_beats_the_roof():
    """A product cannot beat the peak. Memory's roof is a copy, half of which are slower writes."""
    peak, memory = map(
        float, re.search(r"roof: (\S+) GFLOP/s, (\S+) GB", printed("05", "roof-20")).groups()
    )
    rows = re.findall(r"(\S+) GFLOP/s, +(\S+) GB/s", printed("05", "roof-20").split("\n", 1)[1])
    assert len(rows) == 6
    for flops, rate in rows:
        assert float(flops) < 1.1 * peak
        assert float(rate) < 2.5 * memory


def test_05_the_threshold_between_nodes_is_that_of_the_table():
    """FLOPs of an H100 per byte over eight ports: an eighth of the table's last column."""
    row = next(line for line in printed("05", "roof-17").splitlines() if line.startswith("H100"))
    threshold = int(row.split()[-1].replace(",", "")) / 8
    text = source("05", "roof-29")
    numbers = [int(n.replace(",", "")) for n in re.findall(r"\b2,4\d\d\b", text)]
    assert len(numbers) == 4
    assert all(abs(number - threshold) < 1 for number in numbers), numbers


@pytest.mark.parametrize("number", ["783.2", "2,949", "0.5504"])
def test_05_what_one_h100_reached_is_recorded(number):
    record = (ROOT / "benchmarks/results/gpu.md").read_text()
    assert number in record
    shown = {"0.5504": "55 %"}.get(number, number.split(".")[0])
    assert shown in source("05", "roof-16") + source("05", "roof-18")


def test_07_training_amplifies_rounding_in_float32_alone():
    said = re.findall(r"float(\d+): .* 10 steps (\S+), in 88 (\S+)", printed("07", "cell-13"))
    (few32, many32), (few64, many64) = ((float(few), float(many)) for _, few, many in said)
    assert many32 > 100 * few32, 'the text says "several hundred times"'
    scheduled = re.search(r"cosine: .* 10 steps (\S+), in 88 (\S+)", printed("07", "cell-13"))
    assert float(scheduled[2]) < 10 * float(scheduled[1]), 'the text says "a few times only"'
    assert few64 < 1e-12
    assert many64 < 1e-9


CHECKPOINTED = """
from torch.utils.checkpoint import checkpoint

class Net(nn.Module):
    def __init__(self, again):
        super().__init__()
        torch.manual_seed(0)
        self.layers, self.again = nn.ModuleList([nn.Linear(4, 4) for _ in range(3)]), again

    def forward(self, x):
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.again else layer(x)
        return x

gradients = []
for again in (False, True):
    model = Net(again)
    x = torch.arange(8.0).view(2, 4) + rank
    DistributedDataParallel(model)(x).square().mean().backward()
    gradients.append(nn.utils.parameters_to_vector([p.grad for p in model.parameters()]))
print("equal:", torch.equal(*gradients), "of norm", gradients[0].norm() > 0, flush=True)
"""


def test_07_activation_checkpointing_works_under_ddp_as_it_is(tmp_path):
    output = run(tmp_path, JOB.format(before="", after=CHECKPOINTED)).check().output
    assert output.count("equal: True of norm tensor(True)") == 2


PLAIN = """
leaf = torch.ones(2, requires_grad=True)
parts = [torch.empty(2) for _ in range(world_size)]
dist.all_gather(parts, leaf)
try:
    torch.cat(parts).sum().backward()
except RuntimeError as error:
    print(error, flush=True)
"""


def test_03_no_gradient_passes_a_plain_all_gather(tmp_path):
    output = run(tmp_path, JOB.format(before="", after=PLAIN)).check().output
    assert output.count("does not require grad and does not have a grad_fn") == 2


def test_12_bytes_are_those_of_a_group_of_two():
    """On the 2 x 2 mesh a row of two ranks sums half of the tokens: 32 x 32 numbers."""
    sent = 2 * (2 - 1) / 2 * 32 * 32 * 4
    assert f"all_reduce {sent / 1e3:.0f} KB |" in printed("12", "c040")


def test_12_a_hint_about_an_exchange_does_not_speak_of_all_reduce(capsys, monkeypatch):
    monkeypatch.syspath_prepend(FOLDER)
    from exercises import check

    answers = {"partial_to_replicate": 112, "partial_to_shard_to_replicate": 112}
    answers |= {"shard_to_shard": 56, "check": check}  # 56 MiB: an all_gather of shards
    for _ in range(2):  # hints come after the second wrong answer
        exec(source("12", "c058"), answers)
    first, second = capsys.readouterr().out.splitlines()
    assert "Shard(0) to Shard(1): that is one all_gather" in first
    assert "keeps what is for itself" in second


GREEDY = """
check = lambda *args, **kwargs: None
best_word = None
{cell}


def with_objects(send, best):
    def best_word(logits):
        every = [None] * world_size
        dist.all_gather_object(every, send(logits))
        return best(every)

    return best_word


def candidate(logits):
    value, index = logits.max(dim=0)
    return value.item(), index.item() + rank * len(logits)


for send, best in (
    (candidate, lambda every: max(every)[1]),
    (lambda logits: logits, lambda every: torch.cat(every).argmax().item()),
    (lambda logits: logits.tolist(), lambda every: torch.tensor(sum(every, [])).argmax().item()),
):
    try:
        greedy(with_objects(send, best))
        print("accepted")
    except AssertionError as error:
        print(error)
"""


def test_13_words_may_be_found_with_objects_but_not_all_logits(tmp_path):
    cell = source("13", "c063").removeprefix("%%px\n")
    output = run(tmp_path, JOB.format(before="", after=GREEDY.format(cell=cell)))
    lines = output.check().output.splitlines()
    assert lines.count("accepted") == 2
    assert lines.count("that gathers the logits: send only what can win") == 4


POLICIES = """
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.debug import CommDebugMode

nodes = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
for built in (torch.float32, torch.bfloat16):
    model = fully_shard(nn.Linear(8, 8, dtype=built), mesh=nodes, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 8)).float().sum().backward()
    optimizer.step()
    moments = optimizer.state[model.weight]["exp_avg"]
    print("built, kept:", built, *{t.dtype for t in (model.weight, model.weight.grad, moments)})
for ask in (True, False):
    model = fully_shard(nn.Linear(8, 8), mesh=nodes)
    with CommDebugMode() as calls:
        for micro_batch in range(4):
            model.set_requires_all_reduce(micro_batch == 3 or not ask)
            model(torch.ones(2, 8)).sum().backward()
    sums = [n for op, n in calls.get_comm_counts().items() if "allreduce" in op.__name__]
    print("asked:", ask, "sums:", sums)
"""


def test_09_shards_keep_the_type_of_the_model_and_one_sum_is_asked_for(tmp_path):
    assert "the type in which the model was built" in source("09", "fsdp-21")
    assert "Without it, `fully_shard` sums between nodes in each one." in source("09", "fsdp-29")
    output = run(tmp_path, JOB.format(before="", after=POLICIES)).check().output
    for kept in ("torch.float32", "torch.bfloat16"):
        assert output.count(f"built, kept: {kept} {kept}\n") == 2
    assert output.count("asked: True sums: [1]\n") == output.count("asked: False sums: [4]\n") == 2


CHECKPOINTED_RING = """
from torch.utils.checkpoint import checkpoint


def ring(q, k, v):
    return RingAttention.apply(q, k, v, True)


own = [own_tokens(x, 0, rank, world_size, True).requires_grad_() for x in whole]
for again in (False, True):
    sent.update(messages=0)
    (checkpoint(ring, *own, use_reentrant=False) if again else ring(*own)).sum().backward()
    print("messages:", sent["messages"], flush=True)
"""


def test_16_checkpointing_repeats_the_messages_of_forward(tmp_path):
    cells = [source("16", f"cell-{n}") for n in (10, 12, 14, 17, 22)]
    script = "\n".join(re.sub("%%px.*\n", "", cell) for cell in cells) + CHECKPOINTED_RING
    output = run(tmp_path, JOB.format(before="", after=script)).check().output
    text = source("16", "cell-31")
    for times in ("3N - 2", "4N - 3"):
        assert times in text
        factor, minus = map(int, times.split("N - "))
        assert output.count(f"messages: {factor * 2 - minus}\n") == 2


UNEQUAL = """
F = nn.functional
torch.manual_seed(0)
logits, targets = torch.randn(16, 5), torch.randint(5, (16,))
targets[8:15] = -100  # padding: rank 1 has one target, rank 0 has eight
right = F.cross_entropy(logits, targets)
logits, targets = logits.chunk(2)[rank], targets.chunk(2)[rank]
count = (targets >= 0).sum()
dist.all_reduce(count)
summed = F.cross_entropy(logits, targets, reduction="sum") / count
averaged = F.cross_entropy(logits, targets) / world_size
for name, loss in (("sum over count", summed), ("mean of means", averaged)):
    dist.all_reduce(loss)
    print(f"{name}: {torch.allclose(loss, right)}", flush=True)
"""


def test_16_a_mean_of_means_is_wrong_with_padding(tmp_path):
    output = run(tmp_path, JOB.format(before="", after=UNEQUAL)).check().output
    assert output.count("sum over count: True") == 2
    assert output.count("mean of means: False") == 2
    assert "divides by the number of targets on all ranks" in source("16", "cell-23")
