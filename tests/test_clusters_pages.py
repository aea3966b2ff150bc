"""clusters/network.md, security.md and platforms.md: what of them can be seen without a GPU."""

import base64
import inspect
import mmap
import os
import pickle
import re
from datetime import timedelta
from pathlib import Path

import pool
import pytest
import torch
import torch.distributed as dist
from helpers import ROOT, TORCHRUN, Job, free_port
from torch.distributed import distributed_c10d
from torch.distributed.run import get_args_parser

CLUSTERS = ROOT / "clusters"


def text(page: str) -> str:
    return (CLUSTERS / page).read_text()


# ---- network.md


@pytest.fixture(scope="module")
def nccl() -> bytes:
    found = [*Path(torch.__file__).parents[1].glob("nvidia/**/libnccl.so.2")]
    if not found:
        pytest.skip("this torch brings no NCCL")
    return found[0].read_bytes()


@pytest.mark.parametrize(
    ("on_the_page", "in_nccl"),
    [
        ("NET/IB : Using [0]", "NET/IB : Using%s"),
        ("Using network IB", "Using network %s"),
        ("NET/Socket : Using [0]", "NET/Socket : Using%s"),
        ("Count not open libibverbs.so.1", "Count not open %s"),
        ("NET/IB : No device found.", "NET/IB : No device found."),
        ("via NET/IB/0/GDRDMA", "via NET/%s/%d%s%s%s"),
        ("/GDRDMA", "/GDRDMA"),
        ("via P2P/", "via P2P/"),
        ("via SHM/", "via SHM/"),
        ("ibv_create_qp", "ibv_create_qp"),
        ("ibv_reg_mr", "ibv_reg_mr"),
    ],
)
def test_the_lines_to_look_for_are_those_of_nccl(nccl, on_the_page, in_nccl):
    assert on_the_page in text("network.md")
    assert nccl.find(in_nccl.encode()) > 0


def test_the_variables_are_known_to_nccl(nccl):
    """It keeps their names with or without NCCL_ in front."""
    page = text("network.md")
    names = set(re.findall(r"NCCL_(\w+)", page))
    assert len(names) > 10
    unknown = {name for name in names if nccl.find(name.encode()) < 0}
    assert not unknown, unknown


def test_the_option_is_torchruns():
    assert "torchrun --numa-binding=node" in text("network.md")
    assert get_args_parser().parse_args(["--numa-binding=node", "x.py"]).numa_binding == "node"


# ---- chapter 18, "The same with NCCL"

NEW_NCCL = pytest.mark.skipif(torch.__version__ < "2.15", reason="the backend nccl is another one")


@NEW_NCCL
def test_what_the_course_says_of_torchs_nccl_is_in_torch():
    page = (ROOT / "notebooks/18_traces_and_hangs.ipynb").read_text()
    source = inspect.getsource(distributed_c10d)
    for name in ("TORCH_DIST_USE_NCCL2", "nccl-legacy", "TORCH_DIST_NAN_CHECK"):
        assert name in page
        assert name in source
    library = Path(torch.__file__).parent / "lib/libtorch_cuda.so"
    if not library.exists():
        pytest.skip("this torch has no NCCL")
    with open(library, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as code:
        for line in ("Operation timed out", "Aborting process on rank "):
            assert line in page
            assert code.find(line.encode()) > 0


NAN = """
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
try:
    dist.all_reduce(torch.full((2,), torch.nan))
except RuntimeError as error:
    print(error)
dist.destroy_process_group()
"""


@pytest.mark.slow
@NEW_NCCL
def test_a_nan_is_an_error_at_its_collective(tmp_path):
    script = tmp_path / "nan.py"
    script.write_text(NAN)
    assert "NaN" not in pool.run(script, ranks=2).check().output
    checked = pool.run(script, ranks=2, TORCH_DIST_NAN_CHECK="1").check().output
    assert checked.count("NaN found in input tensor") == 2


# ---- security.md


class Opens:
    """Unpickled, it creates a file."""

    def __init__(self, path: Path):
        self.path = str(path)

    def __reduce__(self):
        return os.open, (self.path, os.O_CREAT | os.O_WRONLY)


@pytest.mark.slow
def test_an_agent_runs_what_a_stranger_puts_into_its_store(tmp_path):
    """One agent of two waits for the other; a process that knows nothing but the port writes."""
    port, mark = free_port(), tmp_path / "mark"
    options = ["--nnodes=2", "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}"]
    with Job([*TORCHRUN, *options, "--rdzv-id=a", "script.py"]) as job:
        store = None

        def reached() -> bool:
            nonlocal store
            try:
                store = dist.TCPStore("127.0.0.1", port, timeout=timedelta(seconds=1))
            except RuntimeError:
                return False
            return store.check(["torch.rendezvous.a"])

        job.wait_until(reached, 100)
        store.set("torch.rendezvous.a", base64.b64encode(pickle.dumps(Opens(mark))).decode())
        job.wait_until(mark.exists, 60)


# ---- platforms.md


def test_the_line_of_torchrun():
    """Its options are torchrun's: numbers for two hosts."""
    (line,) = re.findall(r"^torchrun (.*) SCRIPT$", text("platforms.md"), re.M)
    line = line.replace("NODES", "2").replace("NUMBER", "1").replace("FIRST", "host0")
    options = get_args_parser().parse_args([*line.split(), "script.py"])
    assert (options.nnodes, options.node_rank, options.master_addr) == ("2", 1, "host0")
