"""Model the links between ranks: a table of latencies and rates, and when each message arrives.

    default      50us  10Gbit         # every pair that no other line names
    nodes-of-2    5us  100Gbit        # ranks 0 and 1, 2 and 3, ...
    1-2           1ms  unlimited      # this pair, both ways; 1>2 is one way
    slower  100                       # latencies times 100, rates divided by 100: see below

A message of n bytes takes latency + n / rate (the alpha-beta model), and waits for earlier messages
on the same link. Each direction of each pair is a separate link. The code itself needs about a
millisecond per message and moves some hundred MB/s, so it cannot show links that are faster. A
network that is 100 times slower has the same proportions.
"""

import math
import re
import threading
from dataclasses import dataclass, field
from pathlib import Path

PRESETS = {
    "two-level": "default 50us 10Gbit; nodes-of-2 5us 100Gbit; slower 100",
    "slow": "default 5ms 100Mbit",
}
SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}
BYTES_PER_SECOND = {"Gbit": 1e9 / 8, "Mbit": 1e6 / 8, "Kbit": 1e3 / 8}
BYTES_PER_SECOND |= {"GB": 1e9, "MB": 1e6, "KB": 1e3}


@dataclass(frozen=True)
class Speed:
    latency: float = 0.0  # seconds
    rate: float = math.inf  # bytes per second

    def seconds(self, nbytes: float) -> float:
        return self.latency + nbytes / self.rate


@dataclass
class Links:
    default: Speed = Speed()
    node_size: int = 1
    inside: Speed = Speed()  # between the ranks of one node, which has node_size ranks
    pairs: dict[tuple[int, int], Speed] = field(default_factory=dict)  # (from, to)
    slower: float = 1.0

    def between(self, source: int, to: int) -> Speed:
        speed = self.inside if source // self.node_size == to // self.node_size else self.default
        speed = self.pairs.get((source, to), speed)
        return Speed(speed.latency * self.slower, speed.rate / self.slower)


class Schedule:
    """Computes when each message of a process leaves and arrives: one after another per link."""

    def __init__(self, links: Links):
        self.links = links
        self.free = {}  # (from, to) -> when the last message has left
        self.lock = threading.Lock()  # a link may serve several groups

    def book(self, source: int, to: int, nbytes: float, now: float) -> tuple[float, float]:
        """Of a message sent now: (when its last byte leaves, when its last byte arrives)."""
        speed = self.links.between(source, to)
        with self.lock:
            left = max(now, self.free.get((source, to), -math.inf)) + nbytes / speed.rate
            self.free[source, to] = left
        return left, left + speed.latency


def ring_seconds(links: Links, size: int, nbytes: float) -> float:
    """The time of ring.all_reduce over these links, in seconds, if computing takes no time.

    If all links are equal, it is 2 (p-1) (latency + n / (p rate)).
    """
    schedule, ready = Schedule(links), [0.0] * size
    for _ in range(2 * (size - 1)):
        arrivals = [
            schedule.book(rank, (rank + 1) % size, nbytes / size, ready[rank])[1]
            for rank in range(size)
        ]
        ready = [arrivals[rank - 1] for rank in range(size)]  # then the rank may send the next part
    return max(ready)


def read_links(text: str) -> Links:
    """Read a preset, a file, or the lines themselves, separated by ; or line breaks."""
    if text in PRESETS:
        text = PRESETS[text]
    elif not re.search(r"\s", text):
        try:
            text = Path(text).read_text()
        except OSError as error:
            names = ", ".join(PRESETS)
            raise ValueError(f"a file of links, or {names}, not {text}: {error.strerror}") from None
    links = Links()
    for line in re.split(r"[;\n]", text):
        words = line.partition("#")[0].split()
        if words:
            read_line(words, links)
    return links


def read_line(words: list[str], links: Links) -> None:
    where, *values = words
    if where == "slower" and len(values) == 1:
        links.slower = positive(values[0], {"": 1.0})
        return
    if len(values) != 2:
        raise ValueError(f"a line of links is WHERE LATENCY RATE, not '{' '.join(words)}'")
    latency = 0.0 if values[0] == "0" else positive(values[0], SECONDS)
    rate = math.inf if values[1] == "unlimited" else positive(values[1], BYTES_PER_SECOND)
    speed, pair = Speed(latency, rate), re.fullmatch(r"(\d+)([->])(\d+)", where)
    node = re.fullmatch(r"nodes-of-([1-9]\d*)", where)
    if where == "default":
        links.default = speed
    elif node:
        links.node_size, links.inside = int(node[1]), speed
    elif pair:
        a, both, b = int(pair[1]), pair[2] == "-", int(pair[3])
        links.pairs[a, b] = speed
        if both:
            links.pairs[b, a] = speed
    else:
        raise ValueError(f"links are of default, nodes-of-N, A-B or A>B, not '{where}'")


def positive(text: str, units: dict[str, float]) -> float:
    found = re.fullmatch(r"(\d*\.?\d+)([A-Za-z]*)", text)
    if not found or found[2] not in units or float(found[1]) == 0:
        kinds = f"with one of {', '.join(units)}" if len(units) > 1 else "alone"
        raise ValueError(f"a number above 0 {kinds}, not '{text}'")
    return float(found[1]) * units[found[2]]
