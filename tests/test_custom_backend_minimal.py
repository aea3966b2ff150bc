"""custom_backend/minimal_backend.py: minimal.cpp compiles, and DDP trains on it."""

import re

import pytest
from helpers import ROOT, torchrun


@pytest.mark.slow
def test_ddp_on_the_smallest_backend_in_cpp(tmp_path):
    script = ROOT / "custom_backend/minimal_backend.py"
    output = torchrun(script, timeout=600, TORCH_EXTENSIONS_DIR=str(tmp_path)).check().output
    for rank in range(2):
        assert f"rank {rank}: all_reduce gave [3.0, 30.0]" in output
        line = rf"rank {rank}: DDP's gradients differ from those on Gloo by (\S+) at most"
        assert float(re.search(line, output)[1]) < 1e-6
