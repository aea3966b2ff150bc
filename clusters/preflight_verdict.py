"""Plan the measurements of preflight.py (a round-robin tournament), and judge their results.

Used by clusters/preflight.py. Nothing here uses the network.
"""

from collections import Counter
from statistics import median


def rounds(count: int) -> list[list[tuple[int, int]]]:
    """Every pair of `count` hosts once, in rounds in which no host has two partners.

    A round-robin tournament: one host keeps its seat, all other hosts move by one seat per round.
    count - 1 rounds, or count if it is odd: then one host has no partner in each round.
    """
    seats: list[int | None] = [*range(count)] + [None] * (count % 2)
    plan = []
    for _ in range(len(seats) - 1):
        half = len(seats) // 2
        opposite = zip(seats[:half], reversed(seats[half:]), strict=True)
        plan.append([(a, b) for a, b in opposite if a is not None and b is not None])
        seats = [seats[0], seats[-1], *seats[1:-1]]
    return plan


def ring(hosts: list[int]) -> list[list[tuple[int, int]]]:
    """Neighbours in a ring of the hosts, in rounds in which no host has two partners."""
    count = len(hosts)
    pairs = [(hosts[i], hosts[(i + 1) % count]) for i in range(count if count > 2 else count - 1)]
    last = pairs[count - 1 :] if count % 2 and count > 2 else []
    return [pairs[: count // 2 * 2 : 2], pairs[1::2], last]


def differing(hosts: list[str], same: list[dict]) -> list[str]:
    """Name the hosts whose values differ from those of most hosts."""
    found = []
    for name in dict.fromkeys(name for values in same for name in values):
        values = {host: spoken(at.get(name)) for host, at in zip(hosts, same, strict=True)}
        (usual, times), *others = Counter(values.values()).most_common()
        if others and others[0][1] == times:  # no majority
            listed = ", ".join(f"{host} {value}" for host, value in values.items())
            found.append(f"hosts differ in {name}: {listed}")
        else:
            odd = [host for host in hosts if values[host] != usual]
            found += [f"{host}: {name} {values[host]}, other hosts have {usual}" for host in odd]
    return found


def spoken(value) -> str:
    if isinstance(value, list):
        return " and ".join(f"{n} x {name}" for name, n in Counter(value).items()) or "none"
    return "none" if value is None else str(value)


def wrong_clocks(hosts: list[str], offsets: list[float], limit: float = 1.0) -> list[str]:
    """Name the clocks off the median. offsets: seconds by which each clock is ahead of ours."""
    middle = median(offsets)
    return [
        f"{host}: its clock is {abs(x - middle):.0f} s {'ahead' if x > middle else 'behind'}"
        for host, x in zip(hosts, offsets, strict=True)
        if abs(x - middle) > limit
    ]


def slow_devices(hosts: list[str], speeds: list[list[float]], share: float) -> list[str]:
    """speeds: FLOP/s of each host's processor, then of its GPUs."""
    found = []
    for kind, part in (("processor", slice(1)), ("GPU", slice(1, None))):
        best = max((speed for host in speeds for speed in host[part]), default=0)
        for host, numbers in zip(hosts, speeds, strict=True):
            for index, speed in enumerate(numbers[part]):
                if speed < share * best:
                    device = f"GPU {index}" if kind == "GPU" else "processor"
                    unit, name = (1e12, "TFLOP/s") if kind == "GPU" else (1e9, "GFLOP/s per core")
                    much = f"{speed / unit:.1f} {name}, the best {kind} {best / unit:.1f}"
                    found.append(f"{host}: its {device} is slow: {much}")
    return found


def slow_links(
    hosts: list[str],
    values: dict[tuple[int, int], float],
    share: float,
    say,
    what: str = "link",
    best: float = 0.0,
) -> list[str]:
    """Name slow hosts and links: a host if even its best pair is slow, else the link of the pair.

    values: of pairs of hosts, more is better. say: formats a value. best: of other pairs.
    """
    if not values:
        return []
    best = max(best, *values.values())
    limit = share * best
    best_of = [0.0] * len(hosts)
    for pair, value in values.items():
        for i in pair:
            best_of[i] = max(best_of[i], value)
    measured = {i for pair in values for i in pair}
    slow_hosts = {i for i in measured if best_of[i] < limit}
    if slow_hosts == measured:  # the best is of other pairs: these hosts have no fast pair
        slow_hosts = set()
    found = [
        f"{hosts[i]}: its {what} is slow: {say(best_of[i])} to any host, the best pair {say(best)}"
        for i in sorted(slow_hosts)
    ]
    for (a, b), value in sorted(values.items()):
        if value < limit and not slow_hosts & {a, b}:
            pair = f"{hosts[a]} - {hosts[b]}"
            found.append(f"{pair}: the {what} is slow: {say(value)}, the best pair {say(best)}")
    return found


def broken_links(
    hosts: list[str], errors: dict[tuple[int, int], str], tried: int | None = None
) -> list[str]:
    """Name unreachable hosts and pairs. errors: of the failed pairs. tried: number of hosts."""
    tried = len(hosts) if tried is None else tried
    of = Counter(i for pair in errors for i in pair)
    most = max(of.values(), default=0)
    # An unreachable host is in all broken pairs; each of its partners is in one.
    unreachable = {i for i, times in of.items() if times == tried - 1 == most and tried > 2}
    found = [
        f"{hosts[i]}: no connection with any host: {next(e for p, e in errors.items() if i in p)}"
        for i in sorted(unreachable)
    ]
    for (a, b), error in sorted(errors.items()):
        if not unreachable & {a, b}:
            found.append(f"{hosts[a]} - {hosts[b]}: no connection: {error}")
    return found
