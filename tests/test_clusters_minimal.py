"""clusters/minimal.py; test_clusters_lab.py runs it on three hosts."""

import re

import pool
import pytest
from helpers import ROOT


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "nodes"), [(2, 1), (4, 2)])
def test_minimal(ranks, nodes):
    said = pool.run(ROOT / "clusters/minimal.py", ranks=ranks, nodes=nodes).check().output
    assert re.findall(r"^rank (\d) on \S+, cpu$", said, re.M) == [str(i) for i in range(ranks)]
    assert re.search(r"^gradient equals one process's; all_reduce sends [\d,]+ MB/s$", said, re.M)
