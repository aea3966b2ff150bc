"""How long a ring takes, and how many bytes it puts on which wire."""

from dataclasses import dataclass

import numpy as np
from shapes import Cluster, Number

REACHED = 0.8  # of a link's datasheet bandwidth, by large messages


@dataclass(frozen=True)
class Ring:
    """An all_gather or a reduce_scatter. An all_reduce is both: two rings."""

    volume_bytes: Number  # of the full tensor
    size: Number  # ranks of the group
    stride: Number  # distance between neighbours of the group, in ranks
    count: Number = 1

    def ranks_per_node(self, cluster: Cluster) -> Number:
        """How many ranks of one group share a node: k."""
        return np.maximum(1, np.minimum(self.size, cluster.gpus_per_node // self.stride))

    def sent_bytes(self) -> Number:
        """Bytes that each rank sends to its neighbour: (n-1)/n of the tensor."""
        return self.count * self.volume_bytes * (self.size - 1) / self.size

    def port_bytes(self, cluster: Cluster) -> Number:
        """Bytes on one GPU's network port: a ring enters a node once, so k ports share a stream."""
        here = self.ranks_per_node(cluster)
        return np.where(self.size > here, self.sent_bytes() / here, 0)

    def nvlink_bytes(self, cluster: Cluster) -> Number:
        """Bytes that one GPU sends over NVLink."""
        return np.where(self.ranks_per_node(cluster) > 1, self.sent_bytes(), 0)

    def seconds(self, cluster: Cluster, hop_s: Number) -> Number:
        """(n-1)/n of the tensor over the slowest wire of the ring, and a latency for each hop.

        `hop_s` is the latency inside a node; between nodes it is that of the cluster.
        [Thakur, Rabenseifner and Gropp 2005, section 4.1]
        """
        here = self.ranks_per_node(cluster)
        network = self.size > here
        port = np.where(network, here * cluster.nic_gb_s, np.inf)
        slowest = REACHED * 1e9 * np.minimum(cluster.nvlink_gb_s, port)
        latency = np.where(network, cluster.nic_hop_s, hop_s)
        return self.sent_bytes() / slowest + self.count * (self.size - 1) * latency
