"""Pictures of plans: memory and time as stacked bars, and the bytes on the wires of a node."""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from inputs import UserError
from matplotlib.axes import Axes
from memory import USABLE
from report import PARTS, batch, name, wire_gb
from search import Job, Plan

# Okabe and Ito's colours, which colour-blind readers can tell apart.
COLOURS = ("#0072B2", "#56B4E9", "#009E73", "#E69F00", "#D55E00", "#CC79A7", "#F0E442", "#999999")
MEMORY = ("parameters", "gradients", "optimizer", "activations", "logits", "buffers")


def draw(job: Job, plans: list[Plan], path: Path) -> None:
    """Draw the plans to a file. Raises UserError: it cannot be written."""
    figure, axes = plt.subplots(
        1, 3, figsize=(13, 1.6 + 0.42 * len(plans)), width_ratios=(4, 4, 2.6), layout="constrained"
    )
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
