"""transformer_basics/train.py --cp: bytes on its axes, torch's kernel, what it refuses.

Every gradient on meshes with cp is compared in test_transformer_basics.py.
"""

from itertools import pairwise

import pool
import pytest
import torch
from helpers import ROOT, python
from on_demand import OnDemand
from test_transformer_basics import TRAIN, equals_one_process, flags_do_something
from workers.gpt_context import COUNTED, FUSED
from workers.gpt_equivalence import BATCH, LENGTH, VOCABULARY, one_process


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("context")
    script = ROOT / "tests/workers/gpt_context.py"
    pool.run(script, folder / "found", ranks=4, timeout=240).check()
    return torch.load(folder / "found", map_location="cpu")


@pytest.fixture(scope="module")
def reference():
    return OnDemand(one_process)


@pytest.mark.slow
@pytest.mark.parametrize(("flags", "kind"), sorted(COUNTED))
def test_bytes_of_a_rank_are_those_of_the_formula(found, flags, kind):
    """Keys and values take N - 1 steps around the ring in forward, and again in backward; their
    gradients, in float32, take N. Only the heads of keys travel, and those of this tp rank only."""
    words = flags.split()
    size = {a: int(b) for a, b in pairwise(words) if b.isdigit()}
    cp, tp, shards = size["--cp"], size.get("--tp", 1), size.get("--dp-shard", 1)
    numbers = 2 * (BATCH // shards) * (LENGTH // cp) * (2 if kind == "grouped" else 4) // tp * 6
    width = 2 if "bf16" in words else 4
    forwards = 2 if "--activation-checkpointing" in words else 1
    layer = numbers * (width * (cp - 1) * (forwards + 1) + 4 * cp)
    calls = size.get("--accumulate", 1) * 2 * ((cp - 1) * (forwards + 1) + cp)
    for of_rank in found["sent", flags, kind]:
        assert of_rank["cp"] == (calls, 2 * layer)
        assert of_rank["dp_shard"] == (0, 0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "microbatches"),
    [("--cp 4", 1), ("--dp-shard 2 --cp 2", 1), ("--cp 4 --accumulate 2", 2)],
)
def test_fsdp_gathers_and_reduces_over_dp_shard_and_cp(found, flags, microbatches):
    """GPT-2 of two layers in float32: 24 wide, 16 positions, units of embeddings, blocks, head."""
    block = 4 * 24 * 24 + 2 * 24 * 96 + (24 * 3 + 96 + 24) + 4 * 24
    head, tables = VOCABULARY * 24 + 2 * 24, (VOCABULARY + LENGTH) * 24
    everything = tables + 2 * block + head
    numbers = 2 * everything - head + everything  # gathered twice but the head, reduced once
    for of_rank in found["sent", flags, "sgd"]:
        calls, nbytes = of_rank["dp_shard_cp"]
        assert nbytes == microbatches * 4 * numbers * 3 // 4
        assert calls == microbatches * (4 + 3 + 4)


@pytest.mark.device
@pytest.mark.gpu_per_rank(4)
@pytest.mark.slow
@pytest.mark.parametrize(("flags", "kind"), sorted(FUSED))
def test_torchs_kernel_equals_one_process(found, reference, flags, kind):
    """On CPUs with their flash kernel, which the worker gives to torch's ring."""
    equals_one_process(reference[kind], found[flags, kind], kind)
    flags_do_something(reference[kind], found[flags, kind], 4, flags, kind)


@pytest.mark.slow
def test_torchs_kernel_is_refused_on_cpus():
    flags = ("--cp", 2, "--cp-kernel", "torch", "--device", "cpu")
    result = pool.run(TRAIN, *flags, ranks=2)
    assert result.returncode == 2
    sentence = "train.py: error: --cp-kernel torch does not run on cpu: give --cp-kernel ring"
    assert result.output.count(sentence) == 1
    assert "Traceback" not in result.output


GROUPS = """
import sys
sys.path.insert(0, sys.argv[1])
import torch.distributed as dist
from config import AXES
from context_parallel import fsdp_mesh
from timeouts import set_timeout
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed import fake_pg

dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=8)
mesh = init_device_mesh("cpu", (1, 1, 2, 2, 2), mesh_dim_names=AXES)
limited = []
dist.set_timeout = lambda timeout, group: limited.append(group.group_name)
set_timeout(5, mesh)
used = [dist.group.WORLD, *mesh.get_all_groups(), fsdp_mesh(mesh).get_group("dp_shard_cp")]
assert {group.group_name for group in used} <= set(limited), limited
"""


def test_every_group_has_the_time_out(tmp_path):
    """FSDP's group over dp_shard and cp, too, which is no axis of the mesh."""
    (tmp_path / "groups.py").write_text(GROUPS)
    python(tmp_path / "groups.py", ROOT / "transformer_basics").check()
