"""parallel_basics/: each row of "What usually goes wrong" is provoked in its script, then fixed."""

import os
import re

import pytest
import torch
from rows import Copy

pytestmark = pytest.mark.slow  # real jobs that fail, some of them by waiting

ROWS = {
    "the loss is right": "test_one_of_f_and_g_is_missing",
    "a bias counts twice": "test_a_bias_inside_the_sum",
    "`a and b must have same reduction dim`": "test_features_that_do_not_divide",
    "is invalid for input": "test_parallel_basics_grouped.py::test_fewer_key_heads_than_ranks",
    "learn different things": "test_a_batch_for_each_tensor_parallel_rank",
    "`to_local()`": "test_to_local_of_a_partial_tensor",
    "has no style": "test_parallel_basics_tensor.py::test_what_no_plan_fits_is_refused",
    "`got mixed": "test_one_group_of_plain_tensors_and_dtensors",
    "AdamW over": "test_parallel_basics_tensor.py::test_sequence_parallel_script",
    "hangs at the first step": (
        "test_ranks_that_build_different_meshes",
        "test_a_mesh_that_not_all_make",
    ),
    "`terminate called": "test_a_group_that_outlives_the_script",
    "gradients are too large": "test_gradients_of_means_are_added",
    "`PipeliningShapeError": (
        "test_micro_batches_that_are_windows",
        "test_parallel_basics_pipeline.py::test_the_schedule_gets_contiguous_micro_batches",
    ),
    "a tied model": "test_parallel_basics_tied.py::test_copies_that_train_alone_drift_apart",
    "a pipeline deadlocks": "test_sends_that_wait",
    "a pipeline is slow": "test_parallel_basics_pipeline.py::test_from_scratch_prints_what_is_true",
    "context parallelism trains": "test_attention_to_own_tokens_and_positions_from_0",
}
SHORT = ("--layers", 2, "--length", 16, "--dim", 32, "--steps", 1, "--optimizer", "sgd")
TWO_SECONDS = "__import__('datetime').timedelta(seconds=2)"
IMPATIENT = f"distributed_worker(args.device, {TWO_SECONDS})"


@pytest.fixture
def copy(tmp_path) -> Copy:
    return Copy("parallel_basics", tmp_path)


def differences(output: str, title: str) -> dict[str, float]:
    """The line that begins with `title` in the table of differences from one process."""
    lines = output.splitlines()
    at = next(i for i, line in enumerate(lines) if line.endswith(("gradient  parameter", "value")))
    row = next(line for line in lines[at:] if line.startswith(f"{title} "))
    numbers = re.findall(r"\d\.\de[-+]\d\d", row)
    return dict(zip(lines[at].split()[-len(numbers) :], map(float, numbers), strict=True))


def test_one_of_f_and_g_is_missing(copy):
    script = "tensor_parallel_from_scratch.py"

    def by_hand() -> dict[str, float]:
        return differences(copy.run(script, *SHORT).check().output, "sharded by hand")

    assert max(by_hand().values()) < 1e-5
    backward = "        dist.all_reduce(gradient, group=ctx.group)\n"
    copy.edit(script, backward, "")  # a copy in forward without the sum in backward
    wrong = by_hand()
    assert wrong["loss"] < 1e-5
    assert wrong["gradient"] > 0.01
    end = "        return gradient, None\n\n\nclass ReduceFromRanks"
    copy.edit(script, end, backward + end)
    copied = "        return gradient, None\n\n\nclass RowLinear"
    summed = f"        gradient = gradient.clone()\n        dist.all_reduce(gradient)\n{copied}"
    copy.edit(script, copied, summed)  # a sum in forward without the copy in backward
    wrong = by_hand()
    assert wrong["loss"] < 1e-5
    assert wrong["gradient"] > 0.01


def test_a_bias_inside_the_sum(copy):
    """The bias begins at 0, so the second step shows the bug. Cure: the script itself."""
    script = "tensor_parallel_from_scratch.py"
    copy.edit(script, "F.linear(x, self.weight), self", "F.linear(x, self.weight, self.bias), self")
    copy.edit(script, "return y if self.bias is None else y + self.bias", "return y")
    output = copy.run("tensor_parallel_from_scratch.py", *SHORT, "--steps", 2).check().output
    assert differences(output, "sharded by hand")["loss"] > 1e-3


def test_features_that_do_not_divide(copy):
    copy.edit("minimal.py", "features = 480", "features = 481")
    sentence = copy.run("minimal.py", "--steps", 1)
    assert "error: 481 features do not divide over 2 ranks" in sentence.output
    copy.edit("minimal.py", "if features % world_size:", "if False:")
    result = copy.run("minimal.py", "--steps", 1)
    assert result.returncode == 1
    assert "RuntimeError: a and b must have same reduction dim" in result.output
    copy.edit("minimal.py", "features = 481", "features = 482")
    copy.run("minimal.py", "--steps", 1).check()


def test_a_batch_for_each_tensor_parallel_rank(copy):
    """The second layer's bias is replicated; two data-parallel groups of two ranks."""
    one_axis = "init_device_mesh(device.type, (world_size,))"
    copy.edit(
        "minimal.py", one_axis, 'init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))'
    )
    copy.edit(
        "minimal.py", "parallelize_module(model, mesh,", 'parallelize_module(model, mesh["tp"],'
    )
    data = "    images, labels = map("
    copy.edit("minimal.py", data, "    torch.manual_seed(rank)\n" + data)
    end = "    if rank == 0:\n        held = "
    bias = "    print(f'bias of {rank}: {model[2].bias.to_local().tolist()}')\n"
    copy.edit("minimal.py", end, bias + end)

    def biases() -> list[str]:
        output = copy.run("minimal.py", "--steps", 3, ranks=4).check().output
        return [text for _, text in sorted(re.findall(r"bias of (\d): (\[.*\])", output))]

    wrong = biases()
    assert wrong[0] != wrong[1]
    assert wrong[2] != wrong[3]
    copy.edit("minimal.py", "seed(rank)", 'seed(mesh["dp"].get_local_rank())')
    right = biases()
    assert right[0] == right[1] != right[2] == right[3]


def test_one_group_of_plain_tensors_and_dtensors(copy):
    """On CPUs an optimizer takes one parameter at a time, unless it is told otherwise."""
    script, by_mesh = "tensor_parallel.py", "AdamW(by_mesh(params), lr=1e-3)"
    copy.edit("comparing.py", by_mesh, by_mesh.replace("lr", "foreach=True, lr"))
    copy.run(script, *SHORT, "--optimizer", "adamw").check()
    copy.edit("comparing.py", "AdamW(by_mesh(params), f", "AdamW(params, f")
    result = copy.run(script, *SHORT, "--optimizer", "adamw")
    assert result.returncode == 1
    assert "got mixed torch.Tensor and DTensor" in result.output


def test_to_local_of_a_partial_tensor(copy):
    """The script gathers the full tensor of a Partial; to_local() is only a summand."""
    partial = "tensor.placements[0].is_partial()"
    summand = f"(tensor.to_local() if {partial} else tensor.full_tensor())"
    copy.edit("dtensor.py", "tensor.full_tensor().cpu()", summand)
    products = copy.run("dtensor.py").check().output.split("2. x @ y")[1].split("3. other")[0]
    verdicts = re.findall(r"^\w+ +\w+ +(\w+) .* (right|WRONG)$", products, re.M)
    assert len(verdicts) == 16
    assert all((placement == "P") == (verdict == "WRONG") for placement, verdict in verdicts)
    copy.edit(
        "dtensor.py",
        "(tensor.to_local() if",
        '(tensor.redistribute(placements=[PLACEMENTS["R"]]).to_local() if',
    )
    assert "WRONG" not in copy.run("dtensor.py").check().output


@pytest.mark.release
def test_ranks_that_build_different_meshes(copy):
    """It hangs: the groups of a mesh have torch's default timeout."""
    script, flags = "device_mesh.py", ("--shape", 2, 3)
    ours = "init_device_mesh(device, tuple(shape),"
    turned = ours.replace("tuple(shape)", "tuple(shape)[:: 1 if dist.get_rank() else -1]")
    copy.edit(script, ours, turned)
    # It hangs in a sum over the ranks of an axis, or while these ranks connect.
    with pytest.raises(TimeoutError, match=r"in members|in _init_one_process_group"):
        copy.run(script, *flags, ranks=6, timeout=20)
    copy.edit(script, turned, ours)
    copy.run(script, *flags, ranks=6).check()


def test_a_mesh_that_not_all_make(copy):
    script, flags = "device_mesh.py", ("--shape", 2, 2)
    makes = '        slices[f"{names[0]} and {names[1]} flattened"]'
    some_make = f"        if dist.get_rank() > 0:\n    {makes}"
    copy.join_slowly()
    copy.edit(script, makes, some_make)
    copy.edit(script, "distributed_worker(args.device)", IMPATIENT)
    result = copy.run(script, *flags, ranks=4)
    assert result.returncode == 1
    says = "Timed out waiting 2000ms|Connection closed by peer|Read error"
    assert re.search(says, result.output)
    copy.edit(script, some_make, makes)
    copy.edit(script, IMPATIENT, "distributed_worker(args.device)")
    copy.run(script, *flags, ranks=4).check()


@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="reads thread names from /proc")
def test_a_group_that_outlives_the_script(copy):
    """The cause of the abort, which is rare: threads of Gloo that still run at exit."""
    leaves = "    dist.destroy_process_group()\n"
    names = (
        "open(f'/proc/self/task/{thread}/comm').read() for thread in os.listdir('/proc/self/task')"
    )
    count = f"    print('threads of Gloo:', sum('gloo' in name for name in ({names})))\n"
    copy.edit("minimal.py", leaves, leaves + count)
    left = re.findall(
        r"threads of Gloo: (\d+)", copy.run("minimal.py", "--steps", 1).check().output
    )
    assert len(left) == 2
    assert "0" not in left
    text = (copy.path / "minimal.py").read_text()
    ours = "    from runtime import distributed_worker\n\n"
    ours += "    with distributed_worker('cpu') as worker:\n"
    ours += "        train(worker.device, worker.rank, worker.world_size, args.steps)\n"
    begin, end = text.index('    if "RANK" not in'), text.index(count)
    copy.edit("minimal.py", text[begin:end], ours)
    left = re.findall(
        r"threads of Gloo: (\d+)", copy.run("minimal.py", "--steps", 1).check().output
    )
    assert left == ["0", "0"]


def test_gradients_of_means_are_added(copy):
    def of_1f1b() -> dict[str, float]:
        output = copy.run("pipeline_parallel.py", *SHORT, "--layers", 4).check().output
        return differences(output, "1F1B")

    assert max(of_1f1b().values()) < 1e-5
    copy.edit(
        "pipeline_parallel.py",
        "loss_fn(output, targets) / microbatches",
        "loss_fn(output, targets)",
    )
    copy.edit(
        "pipeline_parallel.py",
        "torch.stack(losses).detach().sum()",
        "torch.stack(losses).detach().mean()",
    )
    wrong = of_1f1b()
    assert wrong["loss"] < 1e-5
    assert wrong["gradient"] > 0.1


@pytest.mark.skipif(torch.__version__ >= "2.13", reason="newer torch takes windows as well")
def test_micro_batches_that_are_windows(copy):
    copy.run("pipeline_parallel.py", *SHORT, "--layers", 4).check()
    path = copy.path / "compare_pipelines.py"
    path.write_text(path.read_text().replace(".contiguous()", ""))
    path = copy.path / "pipeline_parallel.py"
    path.write_text(path.read_text().replace(".contiguous()", ""))
    result = copy.run("pipeline_parallel.py", *SHORT, "--layers", 4)
    assert "PipeliningShapeError" in result.output
    assert "stride mismatch" in result.output


def test_sends_that_wait(copy):
    """The script itself is the cure: test_parallel_basics_pipeline.py runs it."""
    script = "pipeline_from_scratch.py"
    copy.join_slowly()
    copy.edit(script, "distributed_worker(args.device)", IMPATIENT)
    copy.edit(script, "self.sends[i] = dist.isend(", "dist.send(")
    copy.edit(script, "self.sends.pop(i).wait()", "pass")
    copy.edit(script, "work = dist.isend(", "dist.send(")
    copy.edit(script, "self.gradient_sends.append(work)", "pass")
    group = f"dist.new_group(ranks, timeout={TWO_SECONDS})"
    both = "return dist.new_group(ranks), dist.new_group(ranks)"
    copy.edit(script, both, f"return {group}, {group}")
    result = copy.run(script, *SHORT)
    assert result.returncode == 1
    assert "Timed out waiting 2000ms for send operation" in result.output


def test_attention_to_own_tokens_and_positions_from_0(copy):
    script = "ring_attention.py"

    def worst() -> float:
        output = copy.run(script, "--steps", 1, "--length", 64).check().output
        return max(
            max(differences(output, f"tokens {how}").values()) for how in ("in order", "balanced")
        )

    assert worst() < 1e-4
    positions = "return own_tokens(positions_T, 0, ring.rank, ring.size, balanced)"
    copy.edit(script, positions, "return positions_T[:length]")
    assert worst() > 0.01
    copy.edit(script, "return positions_T[:length]", positions)
    local = "partial(torch.nn.functional.scaled_dot_product_attention, is_causal=True)"
    copy.edit(script, "partial(ring_attention, ring=ring), pos", f"{local}, pos")
    assert worst() > 0.01
