"""network.wires of the planner against played rings, a counted cable and published bandwidths."""

import dataclasses
import itertools
import math
import re
from collections import Counter

import network
import pytest
import shapes
import step_time
from helpers import ROOT
from network import wires

MODEL = shapes.Model(32, 4096, 32, 8, 128, 14336, 1, 128256, 0)
MESH = shapes.Mesh(1, 1, 0, 1, 0, 1, 1, 32, 1, 1, 2**17, 0, 0, 1)  # cp 32


def groups(mesh: dict[str, int], axis: str) -> list[list[int]]:
    """The groups of ranks along an axis; rank 0 is at the origin, the last axis varies fastest."""
    names = list(mesh)
    ranks = {c: r for r, c in enumerate(itertools.product(*map(range, mesh.values())))}
    found = {}
    for coordinate, rank in ranks.items():
        others = tuple(x for name, x in zip(names, coordinate, strict=True) if name != axis)
        found.setdefault(others, []).append(rank)
    return list(found.values())


def play_all_gather(group: list[int], per_node: int, sent: Counter) -> None:
    """Gather one chunk per rank in rings, one for each port of the group on a node.

    Ring i passes a part of each chunk on, chunk by chunk, until every rank has it; inside a node it
    begins with the i-th rank of the group there. sent[rank, wire]: parts of chunks.
    """
    nodes = [list(ranks) for _, ranks in itertools.groupby(group, lambda rank: rank // per_node)]
    lanes = len(nodes[0])
    for i in range(lanes):
        ring = [rank for node in nodes for rank in node[i:] + node[:i]]
        has = {rank: {rank} for rank in ring}
        for step in range(len(ring) - 1):
            for place, rank in enumerate(ring):
                chunk, to = ring[place - step], ring[(place + 1) % len(ring)]
                assert chunk in has[rank]
                has[to].add(chunk)
                wire = "nvlink" if rank // per_node == to // per_node else "port"
                sent[rank, wire] += 1 / lanes
        assert all(len(chunks) == len(ring) for chunks in has.values())


MESHES = [
    ({"dp": 32}, 8),
    ({"dp": 16}, 4),
    ({"dp": 8}, 8),
    ({"dp": 4}, 8),
    ({"dp": 3, "tp": 1}, 1),
    ({"dp_shard": 4, "tp": 8}, 8),
    ({"dp_shard": 8, "tp": 4}, 8),
    ({"dp_shard": 16, "tp": 2}, 8),
    ({"tp": 8, "dp_shard": 4}, 8),
    ({"dp_replicate": 4, "dp_shard": 8}, 8),
    ({"dp_replicate": 2, "dp_shard": 16}, 8),
    ({"pp": 2, "dp_replicate": 2, "dp_shard": 4, "tp": 2}, 4),
]


@pytest.mark.parametrize(("mesh", "per_node"), MESHES)
def test_wires_are_those_of_rings_that_are_played(mesh, per_node):
    found = wires(mesh, per_node)
    assert set(found) == set(mesh)
    for axis, size in mesh.items():
        sent = Counter()
        for group in groups(mesh, axis):
            play_all_gather(group, per_node, sent)
        for rank in range(math.prod(mesh.values())):
            played = [sent[rank, wire] / max(1, size - 1) for wire in ("nvlink", "port")]
            assert found[axis] == pytest.approx(tuple(played), abs=1e-9)


def test_groups_that_do_not_fill_their_nodes_are_refused():
    with pytest.raises(ValueError, match="dp_shard: groups of 6 do not fill nodes of 4"):
        wires({"dp_shard": 6}, 4)
    with pytest.raises(ValueError, match="tp: groups of 3 do not fill nodes of 8"):
        wires({"dp_shard": 8, "tp": 3}, 8)


def test_a_ring_of_messages_has_one_port():
    """Ring attention: in rank order one rank of a node sends to the next node, and all it has."""
    cluster = shapes.Cluster(80, 312, 2039, 300, 25, 8)
    sent = Counter()
    for _ in range(31):  # of 32 ranks, each passes on what it has
        for rank in range(32):
            same_node = rank // 8 == (rank + 1) % 32 // 8
            sent[rank, "nvlink" if same_node else "port"] += 1e9 / 32
    ring = network.Ring(1e9, 32, 1, messages=True)
    most = [max(n for (_, over), n in sent.items() if over == wire) for wire in ("nvlink", "port")]
    assert ring.bytes_on_wires(cluster) == pytest.approx(tuple(most))
    assert ring.seconds(cluster, 0) == pytest.approx(sent[7, "port"] / 20e9 + 31 * 5e-6)
    assert step_time.cp_ring(MODEL, MESH).messages


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_ring_attention_sends_gradients_one_hop_more(ranks):
    """As parallel_basics/ counts it: keys and values N - 1 times forward and N - 1 times backward,
    their gradients N times."""
    mesh = dataclasses.replace(MESH, cp=ranks, tp=1, full_checkpointing=0)
    heads, width, tokens = MODEL.kv_heads, MODEL.head_dim, mesh.sequence * mesh.micro_batch / ranks
    block = 2 * 2 * heads * width * tokens  # keys and values, two bytes each
    expected = (3 * ranks - 2) * block if ranks > 1 else 0
    assert step_time.cp_ring(MODEL, mesh).sent_bytes() == pytest.approx(expected)


def table_row(name: str) -> list[str]:
    text = (ROOT / "benchmarks/results/clusters.md").read_text()
    section = text.split("## HSDP and FSDP")[1].split("\n## ")[0]
    return next(row.split("|")[2:] for row in section.splitlines() if row.startswith(f"| {name} |"))


def test_the_counted_cable_of_the_lab():
    """benchmarks/clusters_links.py counts what a host of two ranks sends to the other host.

    4 to 5 % more than the formula are headers: 66 bytes of Ethernet, IP and TCP for each packet of
    at most 1,448. Gloo's reduce_scatter is an all_reduce.
    """
    parameters = int(
        re.search(
            r"([\d,]+) fp32 parameters, 100mbit",
            (ROOT / "benchmarks/results/clusters.md").read_text(),
        )[1].replace(",", "")
    )
    flat, hybrid = {"dp": 4}, {"replicate": 2, "shard": 2}
    ring, half = 3 / 4 * 4 * parameters, 1 / 2 * 4 * parameters
    sent = {  # by each rank: two all_gathers, and an all_reduce in place of the reduce_scatter
        "DDP": (flat, {"dp": 2 * ring}),
        "FSDP": (flat, {"dp": 4 * ring}),
        "HSDP": (hybrid, {"shard": 4 * half, "replicate": 2 * half / 2}),
    }
    crossed = {}
    for name, (mesh, axes) in sent.items():
        parts = wires(mesh, 2)
        crossed[name] = sum(2 * parts[axis][1] * nbytes for axis, nbytes in axes.items())
        measured = 1e6 * float(table_row(name)[1].split("(")[0])
        assert 1.03 < measured / crossed[name] < 1.06, name
    assert crossed["FSDP"] / crossed["HSDP"] == 3
    # With a reduce_scatter that sends half as much as an all_reduce: 9 / 4.
    assert 2 * wires(flat, 2)["dp"][1] * 3 * ring / crossed["HSDP"] == 9 / 4


# all_reduce or all_gather between hosts: hosts, GPUs per host, GB/s of all ports of a host, busbw.
# busbw is what each rank sends per second. Sources: clusters/network.md.
PUBLISHED = {
    "H100, 8 cards of 400 Gbit/s": (4, 8, 400, 366),
    "A100, 4 cards of 200 Gbit/s": (3, 8, 100, 96),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_bus_bandwidth_between_hosts(name):
    hosts, gpus, ports, busbw = PUBLISHED[name]
    _, port = wires({"dp": hosts * gpus}, gpus)["dp"]
    assert 0.9 < busbw * port / (ports / gpus) <= 1  # of a GPU's share of the ports
    assert busbw > 7 * ports / gpus  # impossible if a port carried all that its GPU's rank sends
