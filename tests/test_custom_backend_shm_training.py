"""Training on custom_backend/shm: losses, gradients and parameters equal to Gloo's."""

import pool
import pytest
import torch
from helpers import ROOT

WORKER = ROOT / "tests" / "workers" / "shm_training.py"
# A strategy on shm -> the strategy on Gloo that must give equal results.
WAYS = {
    name: name
    for name in (
        "ddp", "ddp, unused", "ddp, power sgd", "fsdp", "fsdp, kept", "tensor parallel", "dtensors",
        "checkpoint", "pipeline",
    )
}  # fmt: skip
WAYS |= {"ddp, hook": "ddp", "ddp, hook, views": "ddp", "fsdp, from group": "fsdp"}


@pytest.fixture(scope="module", params=(2, 3), ids=lambda ranks: f"{ranks}ranks")
def seen(request, tmp_path_factory) -> tuple[int, list, list]:
    folder, ranks = tmp_path_factory.mktemp("training"), request.param
    for backend in ("shm", "gloo"):
        pool.run(WORKER, backend, folder, ranks=ranks).check()
    load = {b: [torch.load(folder / f"{b}{r}.pt") for r in range(ranks)] for b in ("shm", "gloo")}
    return ranks, load["shm"], load["gloo"]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.slow
def test_trains_as_on_gloo(seen, way):
    ranks, on_shm, on_gloo = seen
    if ranks != 2 and way in ("pipeline", "tensor parallel"):
        assert way not in on_shm[0]
        return
    for mine, theirs in zip(on_shm, on_gloo, strict=True):
        assert len(mine[way]) == len(theirs[WAYS[way]]) > 0
        for a, b in zip(mine[way], theirs[WAYS[way]], strict=True):
            if ranks == 2:  # a + b is b + a
                assert torch.equal(a, b)
            else:  # Gloo adds in another order
                torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
