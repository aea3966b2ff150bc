"""How many bytes a collective puts on which wire, and how long its ring takes."""

from dataclasses import dataclass

import numpy as np
from shapes import Cluster, Number

REACHED = 0.8  # of a link's datasheet bandwidth, by large messages


def wires(mesh: dict[str, int], ranks_per_node: int) -> dict[str, tuple[float, float]]:
    """Which part of a rank's bytes its GPU sends over NVLink, and which over its network port.

    mesh: axis -> size, in the order of init_device_mesh: groups of the last axis are neighbours.
    Returns axis -> (NVLink, port), for collectives along the axis that run in rings: all_gather,
    reduce_scatter, all_reduce. They sum to 1; an axis of one rank sends nothing.
    Raises ValueError if the groups do not fill their nodes alike.
    """
    parts, stride = {}, 1  # stride: distance in ranks between two neighbours of a group
    for axis, size in reversed(mesh.items()):
        if (stride * size) % ranks_per_node and ranks_per_node % (stride * size):
            raise ValueError(f"{axis}: groups of {size} do not fill nodes of {ranks_per_node}")
        parts[axis] = tuple(map(float, parts_of_a_ring(size, stride, ranks_per_node)))
        stride *= size
    return parts


def parts_of_a_ring(size: Number, stride: Number, ranks_per_node: Number) -> tuple[Number, Number]:
    """(NVLink, port) of the bytes that each rank of a group sends; `stride` as in `wires`.

    k ranks of the group share a node. A ring enters the node once and leaves it once, and NCCL lays
    k rings, each through another port: a rank sends 1/k over its port, the rest to its neighbours.
    """
    k = sharing(size, stride, ranks_per_node)
    port = np.where(size > k, 1 / k, 0)
    return np.where(size > 1, 1 - port, 0), port


def sharing(size: Number, stride: Number, ranks_per_node: Number) -> Number:
    """How many ranks of one group share a node: k."""
    return np.maximum(1, np.minimum(size, ranks_per_node // stride))


@dataclass(frozen=True)
class Ring:
    """An all_gather or a reduce_scatter. An all_reduce is both: two rings."""

    volume_bytes: Number  # of the full tensor
    size: Number  # ranks of the group
    stride: Number  # distance between neighbours of the group, in ranks
    count: Number = 1
    messages: bool = False  # ring attention: ranks send to their neighbour, in one ring

    def ranks_per_node(self, cluster: Cluster) -> Number:
        return sharing(self.size, self.stride, cluster.gpus_per_node)

    def sent_bytes(self) -> Number:
        """Bytes that each rank sends to its neighbour: (n-1)/n of the tensor."""
        return self.count * self.volume_bytes * (self.size - 1) / self.size

    def bytes_on_wires(self, cluster: Cluster) -> tuple[Number, Number]:
        """Bytes that one GPU sends over NVLink, and over its network port.

        Messages: at most. The last rank of a node sends all of its bytes over its port, and the
        other ranks send nothing over theirs.
        """
        sent = self.sent_bytes()
        if self.messages:
            here = self.ranks_per_node(cluster)
            return np.where(here > 1, sent, 0), np.where(self.size > here, sent, 0)
        nvlink, port = parts_of_a_ring(self.size, self.stride, cluster.gpus_per_node)
        return sent * nvlink, sent * port

    def seconds(self, cluster: Cluster, hop_s: Number) -> Number:
        """(n-1)/n of the tensor over the slowest wire of the ring, and a latency for each hop.

        `hop_s` is the latency inside a node; between nodes it is that of the cluster.
        [Thakur, Rabenseifner and Gropp 2005, section 4.1]
        """
        here = self.ranks_per_node(cluster)
        network = self.size > here
        ports = 1 if self.messages else here
        port = np.where(network, ports * cluster.nic_gb_s, np.inf)
        slowest = REACHED * 1e9 * np.minimum(cluster.nvlink_gb_s, port)
        latency = np.where(network, cluster.nic_hop_s, hop_s)
        return self.sent_bytes() / slowest + self.count * (self.size - 1) * latency
