"""Print and draw recorded messages: sender, receiver, time."""

import time
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Message:
    at: float  # seconds of time.perf_counter(), which all processes of a machine share
    sender: str
    receiver: str
    what: str
    took: float | None = None  # seconds until the answer; None: no answer, or not timed


def now(sender: str, receiver: str, what: str, took: float | None = None) -> Message:
    return Message(time.perf_counter(), sender, receiver, what, took)


def print_sequence(title: str, messages: list[Message]) -> None:
    """Print one line per message in order of time; times are microseconds since the first."""
    messages = sorted(messages, key=lambda message: message.at)
    start = messages[0].at
    rows = [("time (us)", "from", "to", "what", "took (us)")]
    for message in messages:
        took = "" if message.took is None else f"{1e6 * message.took:.0f}"
        at = f"{1e6 * (message.at - start):.0f}"
        rows.append((at, message.sender, message.receiver, message.what, took))
    us, sender, receiver, what, took = (max(map(len, column)) for column in zip(*rows, strict=True))
    print(f"\n{title}")
    for i, row in enumerate(rows):
        arrow = "->" if i else "  "
        line = f"{row[0]:>{us}}  {row[1]:{sender}} {arrow} {row[2]:{receiver}}  {row[3]:{what}}"
        print(f"{line}  {row[4]:>{took}}".rstrip())


def draw(sequences: dict[str, list[Message]], path: Path) -> None:
    """Draw each sequence: one vertical line per sender or receiver, one arrow per message.

    The arrows are evenly spaced, so that you can read all of them; the left margin has their times.
    """
    import matplotlib

    matplotlib.use("Agg")  # no window, no display needed
    import matplotlib.pyplot as plt

    heights = [len(messages) + 2 for messages in sequences.values()]
    figure, axes = plt.subplots(
        len(sequences),
        figsize=(11, 0.32 * sum(heights) + 1),
        height_ratios=heights,
        layout="constrained",
        squeeze=False,
    )
    for ax, (title, messages) in zip(axes[:, 0], sequences.items(), strict=True):
        draw_one(ax, title, messages)
    figure.savefig(path, dpi=150)
    plt.close(figure)
    print(f"\nsaved {path}")


def draw_one(ax, title: str, messages: list[Message]) -> None:
    messages = sorted(messages, key=lambda message: message.at)
    columns = in_order_of_appearance(messages)
    ax.set(title=title, xlim=(-0.6, len(columns) - 0.4), ylim=(len(messages) + 0.5, -1.2))
    names = [name.replace(" ", "\n", 1) if len(name) > 12 else name for name in columns]
    ax.set_xticks(range(len(columns)), names, fontsize=8)
    ax.xaxis.tick_top()
    ax.tick_params(length=0)
    start = messages[0].at
    times = [f"{1e6 * (message.at - start):,.0f} us" for message in messages]
    ax.set_yticks(range(len(messages)), times, fontsize=8)
    for side in ax.spines.values():
        side.set_visible(False)
    for x in range(len(columns)):
        ax.axvline(x, color="0.8", linewidth=1, zorder=0)
    for y, message in enumerate(messages):
        a, b = columns.index(message.sender), columns.index(message.receiver)
        color = "C0" if b > a else "C1"
        if a == b:
            ax.plot(a, y, "o", color="0.3", markersize=4)
        arrow = {"arrowstyle": "->", "color": color, "shrinkA": 0, "shrinkB": 0}
        ax.annotate("", xy=(b, y), xytext=(a, y), arrowprops=arrow)
        took = "" if message.took is None else f", {1e6 * message.took:,.0f} us"
        ax.text((a + b) / 2, y - 0.12, message.what + took, ha="center", va="bottom", fontsize=8)


def in_order_of_appearance(messages: list[Message]) -> list[str]:
    return list(dict.fromkeys(name for m in messages for name in (m.sender, m.receiver)))
