"""Chapters 07, 10, 11, 13 and 15: checks of exercises that took a wrong answer or refused a right
one, and code that a reader copies and runs on other sizes."""

import pytest
import test_notebooks_checks
import torch
from test_notebooks_checks import on_ranks, source
from test_notebooks_claims import JOB, run
from torch import nn

said = test_notebooks_checks.said


# ---- chapter 07


def test_07_an_epoch_is_a_whole_number(said):
    assert said("07", "cell-67", epoch=2, skip=9) == ["correct"] * 2
    assert said("07", "cell-67", epoch=2.0, skip=9.0) == ["correct"] * 2
    first, second = said("07", "cell-67", epoch=53 / 22, skip=0)
    assert first.startswith("not yet: an epoch and a number of batches are whole numbers, not 2.4")
    assert "(Hint: how many whole epochs" in second


SAVE = """
import os
def save(state, path):
    temporary = str(path) + ".tmp"
    torch.save({arguments})
    os.replace(temporary, path)
"""


@pytest.mark.parametrize("arguments", ["obj=state, f=temporary", "state, temporary"])
def test_07_save_may_name_the_arguments_of_torch_save(said, tmp_path, arguments):
    import sys

    names = {"torch": torch, "sys": sys, "FOLDER": tmp_path}
    exec(SAVE.format(arguments=arguments), names)
    assert said("07", "cell-70", **names) == ["correct"] * 2


# ---- chapter 10

_names = {}
exec(source("10", "cell-38"), _names)
intervals = _names["intervals"]


def reads(end):
    """A solution of exercise 1; end: of what is read, from the ends of the rank and of the file."""

    def reads(rows, saved, wanted, rank):
        first, count = intervals(rows, wanted)[rank]
        found = []
        for file, (start, length) in enumerate(intervals(rows, saved)):
            begin = max(first, start)
            if begin < min(first + count, start + length):
                until = end(first + count, start + length)
                found.append((file, begin - start, until - begin))
        return found

    return reads


@pytest.mark.parametrize("end", [lambda rank, file: rank, lambda rank, file: 10**9])
def test_10_a_file_ends(said, end):
    given = {"torch": torch, "intervals": intervals}
    assert said("10", "cell-40", reads=reads(min), **given) == ["correct"] * 2
    first, second = said("10", "cell-40", reads=reads(end), **given)
    assert first.startswith("not yet: 10 rows, 2 -> 3 ranks, rank ")
    assert "past the end of file 0, which has 5 rows" in first
    assert "end = min of the two ends" in second


@pytest.mark.parametrize("files", [2, 10, 12, 48])
def test_10_rows_are_read_in_order_from_any_number_of_files(tmp_path, files):
    names = {"torch": torch, "folder": tmp_path}
    for cell, end in (("cell-12", "\n\n\nbox"), ("cell-17", "\n\n\nthree")):
        exec(source("10", cell).partition(end)[0], names)
    (save,) = (line for line in source("10", "cell-12").splitlines() if "torch.save" in line)
    for rank, (first, count) in enumerate(names["intervals"](96, files)):
        values = torch.arange(96)[first : first + count]
        names |= {"rank": rank, "entries": {"w": {"first": first, "rows": 96, "values": values}}}
        exec(save.strip(), names)
    assert torch.equal(names["read_rows"]("w", 0, 96), torch.arange(96))
    assert torch.equal(names["read_rows"]("w", 7, 50), torch.arange(7, 57))


# ---- chapter 11

ACCOUNTS = {
    "all parameters": {"parameters held": 4, "gradients and AdamW": 12},
    "LoRA": {"parameters held": 4, "gradients and AdamW": 12},
}


@pytest.mark.parametrize(
    ("answers", "line"),
    [
        ((16 * 2_851_598_336 / 8, 4 * 32_128 * 1_024), "correct"),
        ((5.7e9, 132e6), "correct"),
        ((2_851_598_336 * 4 / 8, 132e6), "not yet: rank: that is the parameters alone"),
        ((1.4e9, 132e6), "not yet: rank: that is the parameters alone"),
        ((5.2e9, 132e6), "not yet: rank: bytes a number, over 8 ranks"),
        ((5.7e9, 4 * 132e6), "not yet: matrix: it is one matrix"),
        ((5.7e9, 66e6), "not yet: matrix: whole, in float32"),
    ],
)
def test_11_rounded_bytes_will_do(said, answers, line):
    given = dict(zip(("bytes_per_rank", "bytes_of_the_matrix"), answers, strict=True))
    first, _ = said("11", "cell-051", torch=torch, accounts=ACCOUNTS, **given)
    assert first.startswith(line)


ACCUMULATE = "def accumulate(model, batches, tokens):\n    "
ALL_AT_ONCE = """s, t = (torch.cat(parts) for parts in zip(*batches))
    loss_over_tokens(model, s, t, tokens).backward()
"""
ONE_BACKWARD = """sum(loss_over_tokens(model, s, t, tokens) for s, t in batches).backward()
"""
ONE_BY_ONE = """for i, (s, t) in enumerate(batches):
        model.set_requires_gradient_sync(i == len(batches) - 1)
        loss_over_tokens(model, s, t, tokens).backward()
"""
NEVER_REDUCED = """model.set_requires_gradient_sync(False)
    for s, t in batches:
        loss_over_tokens(model, s, t, tokens).backward()
"""
SYNC_BETWEEN = """for i, (s, t) in enumerate(batches):
        loss = loss_over_tokens(model, s, t, tokens)
        model.set_requires_gradient_sync(i == len(batches) - 1)
        loss.backward()
"""


@pytest.mark.slow
def test_11_batches_are_computed_one_after_another(tmp_path):
    bodies = [ALL_AT_ONCE, ONE_BACKWARD, NEVER_REDUCED, ONE_BY_ONE, SYNC_BETWEEN]
    answers = [ACCUMULATE + body for body in bodies]
    cells = [f"cell-0{n}" for n in ("03", "09", "12", "14", "16", "23")]
    cells.append("from torch.utils._python_dispatch import TorchDispatchMode\n")
    lines = on_ranks(tmp_path, "11", cells, "cell-054", answers, ranks=2)
    assert lines[0][0].startswith("not yet: forward passes: 1, not one for each of the 4 batches")
    assert "one `loss_over_tokens` for each" in lines[0][1]
    assert lines[1][0].startswith("not yet: a forward pass begins before the backward")
    assert "backward() inside the loop" in lines[1][1]
    assert lines[2][0].startswith("not yet: there are no sharded gradients")
    assert lines[3] == lines[4] == ("correct", "correct")  # nothing is left of the answer before


MERGE = """
def merge(adapter):
    rows, columns = adapter.linear.weight.shape
    plain = nn.Linear(columns, rows, bias={bias})
    with torch.{mode}():
        plain.weight.copy_(adapter.linear.weight + adapter.B @ adapter.A)
        if {bias}:
            plain.bias.zero_()
    return plain
"""


@pytest.mark.parametrize(
    ("bias", "mode", "line"),
    [
        (False, "no_grad", "correct"),
        (
            False,
            "enable_grad",
            "not yet: a parameter is changed in place: do so in torch.no_grad()",
        ),
        (True, "no_grad", "not yet: without bias"),
    ],
)
def test_11_a_merged_layer_has_no_bias_and_merge_works_alone(said, bias, mode, line):
    names = {"torch": torch, "nn": nn}
    exec(source("11", "lora-1") + MERGE.format(bias=bias, mode=mode), names)
    assert said("11", "cell-060", **names)[0].startswith(line)


def test_11_an_adapter_is_like_its_layer():
    names = {"torch": torch}
    exec(source("11", "lora-1"), names)
    for like in ({"dtype": torch.bfloat16}, {"device": "meta"}):
        linear = nn.Linear(6, 5, bias=False, **like)
        adapter = names["LoRA"](linear)
        for p in (adapter.A, adapter.B):
            assert (p.dtype, p.device) == (linear.weight.dtype, linear.weight.device)
        assert adapter(torch.ones(2, 6, **like)).dtype == linear.weight.dtype


def test_11_a_model_with_buffers_is_not_filled_in_silence():
    """A Llama's rotary table is in no state dict."""
    lines = [line for line in source("11", "cell-016").splitlines() if "unfilled" in line]
    model = nn.BatchNorm1d(2)
    exec("\n".join(lines), {"model": model})  # the state dict has its averages
    model.register_buffer("table", torch.ones(2), persistent=False)
    with pytest.raises(AssertionError, match=r"without values: \['table'\]"):
        exec("\n".join(lines), {"model": model})


# ---- chapter 13

BY_GATHER = """
def best_word(logits):
    every = [torch.empty_like(logits) for _ in range(world_size)] if rank == 0 else None
    dist.gather(logits, every, dst=0)
    word = torch.zeros(1, dtype=torch.long)
    if rank == 0:
        word[0] = torch.cat(every).argmax()
    dist.broadcast(word, 0)
    return int(word)
"""
IN_PIECES = """
def best_word(logits):
    every = [[torch.empty(8) for _ in range(world_size)] for _ in range(4)]
    for pieces, mine in zip(every, logits.chunk(4)):
        dist.all_gather(pieces, mine.contiguous())
    return torch.cat([torch.cat([p[r] for p in every]) for r in range(world_size)]).argmax().item()
"""
BY_SENDS = """
def best_word(logits):
    word = torch.zeros(1, dtype=torch.long)
    if rank == 0:
        theirs = torch.empty_like(logits)
        dist.recv(theirs, 1)
        word[0] = torch.cat([logits, theirs]).argmax()
        dist.send(word, 1)
    else:
        dist.send(logits, 0)
        dist.recv(word, 0)
    return int(word)
"""
AS_OBJECTS = """
def best_word(logits):
    every = [None] * world_size
    dist.all_gather_object(every, {numbers})
    words = [float(x) for part in every for x in part]
    return words.index(max(words))
"""
TWO_SUMS = """
def best_word(logits):
    value, index = logits.max(0)
    best = value.clone()
    dist.all_reduce(best, op=dist.ReduceOp.MAX)
    word = index + rank * len(logits) if value == best else torch.tensor(10**9)
    dist.all_reduce(word, op=dist.ReduceOp.MIN)
    return int(word)
"""
TWO_NUMBERS = """
def best_word(logits):
    value, index = logits.max(dim=0)
    mine = torch.stack([value.double(), (index + rank * len(logits)).double()])
    every = [torch.empty_like(mine) for _ in range(world_size)]
    dist.all_gather(every, mine)
    return int(max(every, key=lambda pair: pair[0].item())[1])
"""


def test_13_logits_are_not_gathered_in_any_way(tmp_path):
    objects = ("logits.tolist()", "tuple(logits.tolist())", "logits.numpy()")
    answers = [BY_GATHER, IN_PIECES, BY_SENDS]
    answers += [AS_OBJECTS.format(numbers=numbers) for numbers in objects]
    answers += [TWO_SUMS, TWO_NUMBERS]
    lines = on_ranks(tmp_path, "13", ["\n"], "c063", answers, ranks=2)
    for wrong in lines[:6]:
        assert wrong[0] == "not yet: that gathers the logits: send only what can win"
        assert "each rank has one candidate" in wrong[1]
    assert lines[6] == lines[7] == ("correct", "correct")


ODD = """
{cells}
try:
    cut_model(make_model(words=65))
    print("cut", flush=True)
except AssertionError as error:
    print("refused:", error, flush=True)

cut, whole = cut_model(make_model()), make_model()
inputs, targets = batch(0)
targets = targets.clone()
targets[:, ::2] = -100  # labels that do not count
loss_of_cut(cut(inputs), targets).backward()
expected = F.cross_entropy(whole(inputs).flatten(0, 1), targets.flatten())
expected.backward()
print("loss", torch.allclose(loss_of_cut(cut(inputs), targets), expected), flush=True)
for name, p in cut.named_parameters():
    right = whole.get_parameter(name).grad
    if cut_dim(name) is not None:
        right = my_shard(right, cut_dim(name))
    assert torch.allclose(p.grad, right, atol=1e-6), name
print("gradients as in one process", flush=True)
"""


def test_13_the_cut_model_refuses_an_odd_vocabulary_and_skips_masked_labels(tmp_path):
    names = ("c010", "c012", "c016", "c018", "c020", "c022", "c024")
    cells = "\n".join(source("13", cell) for cell in names)
    output = run(tmp_path, JOB.format(before="", after=ODD.format(cells=cells))).check().output
    assert output.count("refused: tokens.weight") == 2
    assert output.count("loss True\n") == output.count("gradients as in one process\n") == 2


# ---- chapter 15


def test_15_a_greedy_cut_is_not_the_best(said):
    def nearest(costs, stages):
        """Stop where the sum is nearest to the average of what remains."""
        sizes, rest = [], list(costs)
        for left in range(stages, 1, -1):
            target, total, n = sum(rest) / left, 0, 0
            while n < len(rest) - left + 1 and (
                n == 0 or abs(total + rest[n] - target) <= abs(total - target)
            ):
                total += rest[n]
                n += 1
            sizes.append(n)
            rest = rest[n:]
        return [*sizes, len(rest)]

    first, second = said("15", "6a00e96e", cut=nearest)
    assert first.startswith("not yet: [5, 2, 2, 2, 1, 3, 9, 4]: a cheaper cut than [3, 3, 2] is")
    assert "try all of them" in second


def test_15_each_stage_has_a_layer(said):
    """Filling each stage up to a limit may leave no layer for the last one."""

    def filled(costs, limit):
        sizes, room = [], 0
        for cost in costs:
            if cost > room:
                sizes.append(0)
                room = limit
            sizes[-1] += 1
            room -= cost
        return sizes

    def cut(costs, stages):
        ways = [filled(costs, limit) for limit in range(max(costs), sum(costs) + 1)]
        return next(sizes for sizes in ways if len(sizes) <= stages)

    first, _ = said("15", "6a00e96e", cut=cut)
    assert first == "not yet: one number for each stage"


PREDICT = """
@torch.no_grad()
def predict(stage, images, m):
    found, sends = [], []
    for x in images.{pieces}:
        out = stage(x if rank == 0 else receive({rows}, rank - 1))
        if rank == world_size - 1:
            found.append(out.argmax(1))
        else:
            sends.append(dist.isend(out, rank + 1))
    for work in sends:
        work.wait()
    return torch.cat(found) if found else None
"""


@pytest.mark.slow
def test_15_micro_batches_of_predict_may_differ_in_size(tmp_path):
    pieces = [("chunk(m)", "len(x)"), ("tensor_split(m)", "len(x)"), ("chunk(m)", "10")]
    pieces += [("split(len(images) // m)", "len(images) // m")]
    answers = [PREDICT.format(pieces=some, rows=rows) for some, rows in pieces]
    cells = ["e33925f9", "e9e31f25", "805c5c98"]
    lines = on_ranks(tmp_path, "15", cells, "401e0def", answers, ranks=4)
    assert lines[0] == lines[1] == ("correct", "correct")
    assert "was called 7 times, not m = 6: of 57 images" in lines[3][0]
    assert "not one digit for each of 57 images" in lines[2][0]
    assert "len(x)" in lines[2][1]


PIPELINE = """
{cells}
try:
    run(one_f_one_b(rank, world_size, 5), my_stage())
    print("ran", flush=True)
except AssertionError as error:
    print("refused:", error, flush=True)

held = []
class Sent:  # a Work that says how long the loop holds it, and the tensor with it
    def __init__(self, work):
        self.work = work
        held.append(self)
    def wait(self):
        held.remove(self)
        self.work.wait()
real, most = dist.isend, 0
dist.isend = lambda *args: Sent(real(*args))
def note():
    global most
    most = max(most, len(held))
for schedule in (gpipe, one_f_one_b):
    for m in (1, 16, 32):
        stage = my_stage()
        stage.zero_grad()
        run(schedule(rank, world_size, m), stage, after=note)
        model = make_model()
        F.cross_entropy(model(images[:64]), labels[:64]).backward()
        for p, q in zip(stage.parameters(), model[2 * rank : 2 * rank + 2].parameters()):
            assert torch.allclose(p.grad, q.grad, atol=1e-6)
assert not held
print("messages held:", most, flush=True)
"""


@pytest.mark.slow
def test_15_the_loop_wants_equal_micro_batches_and_keeps_few_messages(tmp_path):
    names = ("e33925f9", "e9e31f25", "805c5c98", "4c03b9dc")
    cells = "\n".join(source("15", cell) for cell in names)
    script = JOB.format(before="", after=PIPELINE.format(cells=cells))
    output = run(tmp_path, script, ranks=4).check().output
    assert output.count("refused: 64 images") == 4
    held = [int(line.split(": ")[1]) for line in output.splitlines() if "held: " in line]
    assert len(held) == 4
    assert max(held) <= 8
