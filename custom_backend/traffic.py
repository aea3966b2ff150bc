"""Count the bytes that this process sends and receives over each TCP connection (Linux)."""

import os
import socket
import stat
import struct
from collections import Counter

# Where the kernel's struct tcp_info holds tcpi_bytes_received, and tcpi_bytes_sent before
# tcpi_bytes_retrans.
RECEIVED, SENT = 128, 200


def traffic() -> dict[tuple, tuple[int, int]]:
    """(own address, the peer's address) -> bytes sent and received, without resent ones."""
    found = {}
    for number in map(int, os.listdir("/proc/self/fd")):
        try:
            if not stat.S_ISSOCK(os.fstat(number).st_mode):
                continue
            with socket.socket(fileno=os.dup(number)) as connection:
                ends = connection.getsockname(), connection.getpeername()
                info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
            (received,) = struct.unpack_from("Q", info, RECEIVED)
            sent, sent_again = struct.unpack_from("QQ", info, SENT)
            found[ends] = sent - sent_again, received
        except (OSError, struct.error):
            pass  # closed in between, or not a connected TCP socket
    return found


def by_peer(before: dict, after: dict, owners: dict) -> dict[str, tuple[int, int]]:
    """peer -> bytes sent to it and received from it, between two calls of traffic().

    owners: address -> the name of the process that owns this end of a connection.
    """
    sent, received = Counter(), Counter()
    for ends, (all_sent, all_received) in after.items():
        sent_before, received_before = before.get(ends, (0, 0))
        peer = owners.get(ends[1])
        if peer is not None:
            sent[peer] += all_sent - sent_before
            received[peer] += all_received - received_before
    return {peer: (sent[peer], received[peer]) for peer in sent}
