"""The picture of chapters 5 and 14: a node, and the bytes on its NVLink and network ports."""

from collections.abc import Mapping

import matplotlib.pyplot as plt
from matplotlib.axes import Axes

import figures

GPUS = 8
LINK, NIC = figures.COLOURS[1], figures.COLOURS[2]

Wires = Mapping[str, tuple[float, float]]


def bytes_on_wires(meshes: Mapping[str, Wires], speeds: tuple[float, float]) -> None:
    """Draw a node of eight GPUs for each mesh, with what each GPU sends on its two wires.

    meshes: title -> axis -> GB over (NVLink, the GPU's network port); all GPUs send alike.
    speeds: of NVLink and of a port, in GB/s. The wider a line, the longer it is busy.
    Raises AssertionError if an axis is not a ring in which 1, 2, 4 or 8 ranks share a node.
    """
    rows = (len(meshes) + 1) // 2
    figure, axes = plt.subplots(rows, 2, figsize=(figures.WIDTH, 2.9 * rows), squeeze=False)
    longest = max(_seconds(wires, speeds)[side] for wires in meshes.values() for side in (0, 1))
    for ax, (title, wires) in zip(axes.flat, meshes.items(), strict=True):
        for axis, (nvlink, port) in wires.items():
            k = 1 + nvlink / port if port else 1
            assert any(abs(k - n) < 1e-6 for n in (1, 2, 4, 8)), f"{axis}: no ring sends so"
        widths = [14 * s / longest for s in _seconds(wires, speeds)]
        _node(ax, widths)
        over_nvlink, over_port = (_named(wires, side, speeds) for side in (0, 1))
        ax.text(0, 2.75, f"each port: {over_port}", va="bottom")
        ax.text(0, -1.95, f"each NVLink: {over_nvlink}", va="top")
        ax.set_title(title, loc="left", fontweight="bold")
    figures.show(figure)


def _seconds(wires: Wires, speeds: tuple[float, float]) -> list[float]:
    return [sum(parts[side] for parts in wires.values()) / speeds[side] for side in (0, 1)]


def _named(wires: Wires, side: int, speeds: tuple[float, float]) -> str:
    parts = [f"{parts[side]:.3g} GB ({axis})" for axis, parts in wires.items() if parts[side]]
    busy = f", busy for {_seconds(wires, speeds)[side]:.2g} s"
    return " + ".join(parts) + busy if parts else "nothing"


def _node(ax: Axes, widths: list[float]) -> None:
    """GPUs in a row, the NVSwitch below, a network port above each; lines as wide as `widths`."""
    ax.set(xlim=(-0.2, GPUS + 0.1), ylim=(-2.6, 3.3))
    ax.axis("off")
    figures.box(ax, GPUS / 2 - 0.05, -1.5, "NVSwitch", LINK, GPUS - 0.2, 0.6)
    for gpu in range(GPUS):
        x = gpu + 0.45
        if widths[0]:
            ax.plot([x, x], [-1.2, -0.4], color=LINK, linewidth=widths[0], zorder=0)
        if widths[1]:
            ax.plot([x, x], [0.4, 2.05], color=NIC, linewidth=widths[1], zorder=0)
            ax.plot(x, 2.2, "^", color=NIC, markersize=7 + 1.2 * widths[1])  # out of the node
        figures.box(ax, x, 0, f"GPU\n{gpu}", figures.COLOURS[0], 0.8, 0.8)
        figures.box(ax, x, 1.35, "NIC", NIC, 0.8, 0.5)
