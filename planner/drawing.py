"""Pictures of plans: memory and time as stacked bars, and the bytes on the wires of a node."""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from inputs import UserError
from matplotlib.axes import Axes
from matplotlib.figure import FigureBase
from memory import USABLE
from report import PARTS, batch, name, wire_gb, wire_parts
from search import Job, Plan

# Okabe and Ito's colours, which colour-blind readers can tell apart.
COLOURS = ("#0072B2", "#56B4E9", "#009E73", "#E69F00", "#D55E00", "#CC79A7", "#F0E442", "#999999")
MEMORY = ("parameters", "gradients", "optimizer", "activations", "logits", "buffers")


def draw(job: Job, plans: list[Plan], path: Path) -> None:
    """Draw the plans to a file. Raises UserError: it cannot be written."""
    heights = (1.6 + 0.42 * len(plans), 3.2)
    figure = plt.figure(figsize=(13, sum(heights)), layout="constrained")
    upper, lower = figure.subfigures(2, 1, height_ratios=heights)
    axes = upper.subplots(1, 3, width_ratios=(4, 4, 2.6))
    labels = [f"{i}  {name(p.mesh)}   {batch(p.mesh)}" for i, p in enumerate(plans, 1)]
    memory = {part: [plan.memory_gib[part] for plan in plans] for part in MEMORY}
    stacked_bars(axes[0], labels, memory)
    axes[0].axvline(USABLE * job.cluster.gpu_memory_gb, color="black", linestyle="--", linewidth=1)
    axes[0].set(title="memory of the fullest GPU", xlabel="GiB; dashed: what fits")
    seconds = {label: [plan.seconds[part] for plan in plans] for part, label in PARTS.items()}
    longest = max(plan.step_s for plan in plans)
    seconds = {label: s for label, s in seconds.items() if max(s) > 0.002 * longest}
    stacked_bars(axes[1], [""] * len(plans), seconds)
    axes[1].set(title="time of a step", xlabel="seconds")
    wire_bars(axes[2], job, plans)
    nodes(lower, job, plans[:3])
    try:
        figure.savefig(path, dpi=150)
    except (OSError, ValueError) as error:
        raise UserError(f"--plot {path} cannot be written: {error}") from None
    plt.close(figure)


def stacked_bars(ax: Axes, labels: list[str], parts: dict[str, list[float]]) -> None:
    """One bar per plan, its parts side by side, the first plan on top."""
    left = [0.0] * len(labels)
    rows = range(len(labels))
    for (part, values), colour in zip(parts.items(), COLOURS, strict=False):
        ax.barh(rows, values, left=left, color=colour, label=part, height=0.75)
        left = [a + b for a, b in zip(left, values, strict=True)]
    ax.set_yticks(rows, labels, fontsize=8)
    ax.invert_yaxis()
    ax.spines[["top", "right"]].set_visible(False)
    ax.legend(fontsize=8, ncols=3, loc="upper center", bbox_to_anchor=(0.5, -0.16), frameon=False)


def wire_bars(ax: Axes, job: Job, plans: list[Plan]) -> None:
    """Seconds that each wire is busy at its datasheet bandwidth, with the bytes written on it."""
    pairs = [wire_gb(job, plan.mesh) for plan in plans]
    rates = (job.cluster.nvlink_gb_s, job.cluster.nic_gb_s)
    for side, (wire, colour) in enumerate(
        (("in the node", COLOURS[0]), ("network port", COLOURS[4]))
    ):
        rows = [i + 0.4 * side - 0.2 for i in range(len(plans))]
        gb = [pair[side] for pair in pairs]
        ax.barh(rows, [g / rates[side] for g in gb], color=colour, height=0.36, label=wire)
        for row, g in zip(rows, gb, strict=True):
            ax.text(g / rates[side], row, f" {g:,.0f} GB", fontsize=8, va="center")
    ax.set_yticks([])
    ax.invert_yaxis()
    ax.margins(x=0.3)
    ax.spines[["top", "right"]].set_visible(False)
    ax.set(title="busy wires of a GPU", xlabel="seconds at full bandwidth")
    ax.legend(fontsize=8, ncols=2, loc="upper center", bbox_to_anchor=(0.5, -0.16), frameon=False)


def nodes(figure: FigureBase, job: Job, plans: list[Plan]) -> None:
    """A node for each plan. The wider a wire, the longer it is busy at its datasheet bandwidth."""
    rates = (job.cluster.nvlink_gb_s, job.cluster.nic_gb_s)
    busy = [[gb / r for gb, r in zip(wire_gb(job, p.mesh), rates, strict=True)] for p in plans]
    longest = max(max(pair) for pair in busy) or 1
    axes = figure.subplots(1, 3)
    for i, ax in enumerate(axes):
        ax.axis("off")
        if i < len(plans):
            mesh = plans[i].mesh
            ax.set_title(f"{i + 1}  {name(mesh)}: GB that each GPU sends per step", fontsize=9)
            node(ax, min(job.gpus, int(job.cluster.gpus_per_node)), [s / longest for s in busy[i]])
            links, ports = sums(wire_parts(job, mesh))
            ax.text(0, 4.5, f"network port: {ports}", fontsize=8, va="bottom")
            ax.text(0, -1.5, f"links in the node: {links}", fontsize=8, va="top")


def sums(parts: dict[str, tuple[float, float]]) -> list[str]:
    """GB on the links in a node and on a port, by axis: "189 = 155 TP + 34 DP"."""
    found = []
    for side in (0, 1):
        axes = {}
        for key, gb in parts.items():
            axis = "DP" if key.startswith("rep") else key.split()[0]
            axes[axis] = axes.get(axis, 0) + gb[side]
        used = [f"{gb:,.3g} {axis}" for axis, gb in axes.items() if gb]
        total = f"{sum(axes.values()):,.3g} = " if len(used) > 1 else ""
        found.append(total + " + ".join(used) if used else "nothing")
    return found


def node(ax: Axes, gpus: int, widths: list[float]) -> None:
    """Network ports above the GPUs, links below. widths: of a link and a port, from 0 to 1."""
    ax.set(xlim=(-0.1, gpus), ylim=(-2.2, 5.2))
    for gpu in range(gpus):
        x = gpu + 0.45
        wires = ((widths[0], (-0.8, 1), COLOURS[0]), (widths[1], (1, 4.2), COLOURS[4]))
        for width, ends, colour in wires:
            if width:
                ax.plot((x, x), ends, color=colour, linewidth=0.5 + 14 * width, zorder=0)
        box(ax, x, 1, f"GPU\n{gpu}", "white")
        box(ax, x, 3, "NIC", "white")
    box(ax, gpus / 2 - 0.05, -0.8, "NVLink or PCIe", COLOURS[1], gpus - 0.2)


def box(ax: Axes, x: float, y: float, text: str, colour: str, width: float = 0.7) -> None:
    """A box with its middle at (x, y)."""
    corner = (x - width / 2, y - 0.5)
    ax.add_patch(plt.Rectangle(corner, width, 1, facecolor=colour, edgecolor="black", zorder=2))
    ax.text(x, y, text, ha="center", va="center", fontsize=7, zorder=3)
