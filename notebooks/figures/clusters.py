"""Pictures of chapter 19: a rendezvous, a lab, hosts that come and go, how often to save."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import figures


@dataclass(frozen=True)
class Write:
    """One write into a store, by an agent or by a rank of it."""

    seconds: float
    agent: str  # the writer's address, or that of its agent
    what: str
    by_rank: bool = False  # then into the store that the agent of rank 0 serves


def told(
    writes: Sequence[tuple[float, str, str, bytes]], prefix: str, state: Callable
) -> list[Write]:
    """Who wrote it, and in words, of what was read in two stores.

    writes: (seconds, store, key, value); the stores are "agents" and "ranks". prefix: of the keys
    of the round. state: makes (address -> number, complete) of the state's value. Raises
    AssertionError if an agent's ranks do not begin where it was told: then numbers are exchanged.
    """
    (key,) = {key for _, _, key, _ in writes if prefix.startswith(f"{key}.")}
    states = [(seconds, *state(value)) for seconds, _, at, value in writes if at == key]
    agent = {number: address for address, number in states[-1][1].items()}
    counts, starts, found = {}, {}, []
    there = set()
    for seconds, members, complete in states:
        new = set(members) - there
        there |= new
        text = "so am I: complete" if complete else "I am here"
        found += [Write(seconds, address, text) for address in new]
    for seconds, name, at, value in writes:
        short = at.removeprefix(prefix).removeprefix("torchelastic/")
        if name == "agents" and short.startswith("role_info/"):
            number = int(short[-1])
            counts[number] = json.loads(value)["local_world_size"]
            found.append(Write(seconds, agent[number], f"{short}: {counts[number]} rank(s)"))
        elif name == "agents" and short.startswith("assigned_ranks/"):
            begin, world = json.loads(value)[:2]
            starts[int(short[-1])] = begin
            found.append(Write(seconds, agent[0], f"{short}: from {begin}, of {world}"))
        elif name == "agents" and short.startswith("MASTER_"):
            found.append(Write(seconds, agent[0], short))
    owner = []
    for number in sorted(counts):
        assert starts[number] == len(owner), f"agent {number} begins at rank {starts[number]}"
        owner += [agent[number]] * counts[number]
    for seconds, name, at, _ in writes:
        if name == "ranks" and "cpu//0/" in at:
            rank = int(at[-1])
            found.append(Write(seconds, owner[rank], f"rank {rank} listens at ...", by_rank=True))
    # What was found in one look has no order of its own: then by what must have come first.
    causes = ("I am", "so am I", "MASTER_", "role_info", "assigned", "rank ")

    def order(write: Write) -> tuple:
        return write.seconds, next(k for k, c in enumerate(causes) if write.what.startswith(c))

    return sorted(found, key=lambda write: (*order(write), write.what))


def rendezvous(writes: Sequence[Write], first: str) -> None:
    """Who writes what, from top to bottom in the order in which it came.

    first: the agent that serves the ranks' store. Raises AssertionError if a rank writes before all
    agents have, or if there are not two agents: then something is out of order.
    """
    agents = sorted({write.agent for write in writes}, key=lambda agent: agent == first)
    assert len(agents) == 2, f"the agents are {agents}"
    assert first in agents, f"the agents are {agents}"
    kinds = [write.by_rank for write in writes]
    assert kinds == sorted(kinds), "a rank wrote before all agents had"
    times = [write.seconds for write in writes]
    assert times == sorted(times), "not in the order in which it came"
    place = {agents[0]: 0.0, "store": 2.0, first: 4.0}
    colour = dict(zip([first, agents[0]], figures.COLOURS, strict=False))
    bottom = len(writes) - 0.3
    figure, ax = figures.canvas(0.36 * len(writes) + 0.7, (-1.3, 5.0), (bottom, -1.3))
    for name, x in place.items():
        text = "store at the endpoint" if name == "store" else f"agent {name}"
        figures.box(ax, x, -0.8, text, colour.get(name, figures.NOBODY), 1.7, 0.8)
        ax.plot([x, x], [-0.4, bottom], color="0.6", linewidth=1, zorder=0)
    for y, write in enumerate(writes):
        start, end = place[write.agent], place[first if write.by_rank else "store"]
        text = write.what
        ax.text(-1.28, y + 0.1, f"{write.seconds:5.2f} s", fontsize=8, va="center", color="0.4")
        if start == end:  # the rank's own agent serves the store
            ax.plot([end], [y + 0.1], "o", color="0.2", markersize=5)
            ax.text(end - 0.12, y + 0.1, text, fontsize=8, va="center", ha="right")
            continue
        style = {"arrowstyle": "-|>", "color": "0.2"}
        ax.annotate("", (end, y + 0.28), (start, y + 0.28), arrowprops=style)
        pale = {"facecolor": colour[write.agent], "edgecolor": "none", "pad": 1.2}
        middle = (start + end) / 2
        ax.text(middle, y - 0.02, text, fontsize=8, ha="center", va="center", bbox=pale)
    figures.show(figure)


def lab(shown: str) -> None:
    """What `lab.py show` has printed: hosts, a switch, cables.

    Raises AssertionError if no host is there.
    """
    hosts = re.findall(r"^(host\d+) +([\d.]+) +(.+)$", shown, re.MULTILINE)
    assert hosts, f"no host in {shown!r}"
    figure, ax = figures.canvas(2.0, (0, 8), (0, 2))
    width = min(2.2, 8 / len(hosts) - 0.2)
    figures.box(ax, 4, 0.3, "switch", width=1.6, height=0.45)
    for k, (name, address, cable) in enumerate(hosts):
        x = 8 * (k + 0.5) / len(hosts)
        colour = figures.COLOURS[k % len(figures.COLOURS)]
        figures.box(ax, x, 1.6, f"{name}\n{address}", colour, width, 0.6)
        style = ":" if cable == "cut" else "-"
        ax.plot([x, 4 + 0.25 * (x - 4)], [1.3, 0.55], style, color="0.3", zorder=0)
        middle = 4 + 0.62 * (x - 4)
        pad = {"facecolor": "white", "edgecolor": "none", "pad": 1}
        ax.text(middle, 0.92, cable, fontsize=8, ha="center", va="center", bbox=pad)
    figures.show(figure)


def coming_and_going(
    log: Sequence[Mapping], undisturbed: Sequence[Mapping], tolerance: float = 1e-4
) -> None:
    """Left: when which step was made, and by how many ranks. Right: the losses, and one process's.

    log, undisturbed: lines with step, loss, ranks, time (seconds). Raises AssertionError if a loss
    differs by more than `tolerance` from the undisturbed one: then these are not runs of one job.
    """
    right_losses = {line["step"]: line["loss"] for line in undisturbed}
    worst = max(abs(line["loss"] - right_losses[line["step"]]) for line in log)
    assert worst <= tolerance, f"a loss is {worst:g} off"
    figure, (left, right) = figures.panels(2, 3.4)
    zero = log[0]["time"]
    pieces = [[log[0]]]
    for before, line in pairwise(log):
        if line["ranks"] != before["ranks"] or line["step"] <= before["step"]:
            pieces.append([])
        pieces[-1].append(line)
    steps_made = max(right_losses)
    for before, piece in pairwise(pieces):
        lost = before[-1]["step"] - piece[0]["step"] + 1
        begin, end = before[-1]["time"] - zero, piece[0]["time"] - zero
        text = f"{end - begin:.0f} s,\n{lost} step{'s' if lost != 1 else ''}\nlost"
        left.axvspan(begin, end, color="0.92")
        left.text((begin + end) / 2, steps_made / 2, text, fontsize=8, ha="center")
    steps = sorted(right_losses)
    losses = [right_losses[s] for s in steps]
    right.plot(steps, losses, color="0.8", linewidth=6, label="one process, undisturbed")
    for piece in pieces:
        ranks = piece[0]["ranks"]
        label = f"{ranks} rank{'s' if ranks > 1 else ''}"
        colour = figures.LINES[ranks - 1]
        made = [line["step"] for line in piece]
        left.plot([line["time"] - zero for line in piece], made, color=colour)
        right.plot(made, [line["loss"] for line in piece], color=colour, linewidth=1, label=label)
    left.set(xlabel="seconds", ylabel="step")
    right.set(xlabel="step", ylabel="loss of the global batch")
    handles, labels = right.get_legend_handles_labels()
    by_label = dict(zip(labels, handles, strict=True))  # once each
    right.legend(by_label.values(), by_label.keys())
    figures.show(figure)


def intervals(
    save: float,
    mtbf: float,
    goodput: Callable[[float], float],
    simulated: Mapping[float, float],
    best: float,
) -> None:
    """Which share of the time is lost, over the minutes between saves.

    save, mtbf, the keys of `simulated` and best: seconds. goodput: the formula; simulated: goodput
    of the simulation. Raises AssertionError if a dot lies 2 % beside the formula, or another dot is
    1 % better than the best interval.
    """
    for interval, share in simulated.items():
        off = abs(share - goodput(interval))
        assert off < 0.02, f"at {interval:.0f} s the formula is {off:.3f} beside the simulation"
        assert share < goodput(best) + 0.01, f"{interval:.0f} s are better than the best"
    low, high = min(simulated), max(simulated)
    grid = [low * (high / low) ** (k / 99) for k in range(100)]
    minutes = [seconds / 60 for seconds in grid]
    figure, ax = figures.panels(1, 3.4)
    saving = [goodput(x) * save / x for x in grid]
    again = [goodput(x) * x / 2 / mtbf for x in grid]
    ax.plot(minutes, saving, "--", label="saving")
    ax.plot(minutes, again, "--", label="done again")
    ax.plot(minutes, [1 - goodput(x) for x in grid], label="all that is lost, restarts too (Daly)")
    dots = [seconds / 60 for seconds in simulated]
    ax.plot(dots, [1 - share for share in simulated.values()], "o", label="simulated")
    ax.axvline(best / 60, color="0.5", linestyle=":")
    ax.text(best / 60, 0.54, f" {best / 60:.0f} minutes", color="0.3")
    ax.set(xscale="log", xlabel="minutes between saves", ylabel="share of the time", ylim=(0, 0.6))
    ax.set_xticks(dots, [f"{minute:.3g}" for minute in dots])
    ax.minorticks_off()
    ax.legend(loc="upper left")
    figures.show(figure)
