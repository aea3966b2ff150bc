"""Memory of the planner against pipelines that are executed, operation by operation."""

import dataclasses

import inputs
import memory
import pytest
import shapes
import stacks

STACK = stacks.Stack(activation_factor=0.85, base_gib=0)
ONE = shapes.Mesh(1, 1, 1, 1, 0, 1, 1, 1, 1, 1, 8192, 0, 0, 1)
LLAMA = inputs.model("llama-3.1-405b")  # 126 layers: embedding and output layer take a place each


def operations(pp: int, v: int, m: int, rank: int) -> list[tuple[int, int]]:
    """(+1 forward or -1 backward, chunk) of a rank, in the order of 1F1B.

    With v chunks per rank in Megatron-LM's interleaved order: micro-batches go through each chunk
    in rounds of pp.
    """
    forward = [(+1, i % (pp * v) // pp) for i in range(m * v)]
    backward = [(-1, v - 1 - i % (pp * v) // pp) for i in range(m * v)]
    ahead = pp - rank - 1 if v == 1 else 2 * (pp - rank - 1) + (v - 1) * pp
    order = forward[:ahead]
    for pair in zip(forward[ahead:], backward, strict=False):
        order += pair
    return order + backward[len(forward[ahead:]) :]


def peak_bytes(model, mesh, layers: list[list[int]], rank: int) -> float:
    """Most bytes that a rank holds at once; layers[rank][chunk].

    Llama's layer keeps 10 h + 4 d (a + k) + 8 f bytes of a token; SP shares all of it among tp.
    """
    pp, tp = len(layers), mesh.tp
    h, d, f = model.width, model.head_dim, model.ffn
    matrices = h * d * 2 * (model.heads + model.kv_heads) + 3 * h * f
    kept = (10 * h + 4 * d * (model.heads + model.kv_heads) + 8 * f) / tp
    live = most = 0
    for sign, chunk in operations(pp, mesh.virtual_stages, mesh.accumulation, rank):
        live += sign * layers[rank][chunk]
        most = max(most, live)
    assert live == 0
    weights = (sum(layers[rank]) * matrices + (rank in (0, pp - 1)) * model.vocab * h) / tp
    state = weights * (2 + 4 + 12 / mesh.dp_replicate)
    logits = 10 * mesh.tokens * model.vocab / tp if rank == pp - 1 else 0
    return state + 0.85 * most * mesh.tokens * kept + logits


def places(layers: int, pp: int, v: int) -> list[list[int]]:
    """Layers of each chunk: as many everywhere, or one less in the first and the last one."""
    every = -(-layers // (pp * v))
    found = [[every] * v for _ in range(pp)]
    if layers % (pp * v):
        found[0][0] -= 1
        found[-1][-1] -= 1
    assert sum(map(sum, found)) == layers
    return found


@pytest.mark.parametrize(
    ("layers", "pp", "v", "m", "fullest"),
    [
        (126, 32, 4, 32, 1),  # Llama 3.1 405B on 16,384 GPUs: all micro-batches are in flight
        (126, 32, 1, 512, 1),
        (126, 64, 2, 1024, 1),
        (126, 16, 1, 16, 1),
        (126, 9, 1, 64, 0),  # 14 layers everywhere
        (128, 16, 4, 64, 0),
        (128, 16, 1, 64, 0),
        (6, 2, 1, 8, 0),  # no stage between
        (6, 2, 3, 8, 1),  # interleaved, the last stage holds many micro-batches, and the logits
    ],
)
def test_the_fullest_stage_of_an_executed_pipeline(layers, pp, v, m, fullest):
    model = dataclasses.replace(LLAMA, layers=layers)
    sizes = {"dp_replicate": 4, "tp": 8, "sequence_parallel": 1, "pp": pp}
    mesh = dataclasses.replace(ONE, **sizes, virtual_stages=v, accumulation=m)
    held = [peak_bytes(model, mesh, places(layers, pp, v), rank) for rank in range(pp)]
    found = float(memory.memory_gib(model, mesh, STACK)) * 2**30
    assert found == pytest.approx(max(held), rel=1e-9)
    place = int(memory.fullest_stage(model, mesh, STACK))
    assert held.index(max(held)) == fullest == (0, 1, pp - 1)[place]
