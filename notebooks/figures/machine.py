"""Pictures of chapter 5: how fast numbers move, the roofline, and the third roof: the link."""

from matplotlib.ticker import FuncFormatter

import figures

BOUND = {"compute": figures.LINES[0], "memory": figures.LINES[1]}


def three_speeds(name: str, peak: float, memory: float, wires: dict[str, float]) -> None:
    """Draw one device as data goes: wires -> memory -> matrix units, with FLOPs per byte.

    peak: FLOP/s; memory: bytes/s; wires: name -> bytes/s in one direction.
    The FLOPs per byte are computed from the speeds here, so that they cannot be anybody else's.
    """
    figure, ax = figures.canvas(2.4, (0, 16), (-1.2, 2.2))
    places = [(14.2, f"matrix units\n{_si(peak)}FLOP/s", figures.COLOURS[0])]
    places += [(8.9, f"memory\n{_si(memory)}B/s", figures.COLOURS[1])]
    for x, text, colour in places:
        figures.box(ax, x, 0.5, text, colour, width=3.2, height=1.6)
    figures.arrow(ax, (10.5, 0.5), (12.6, 0.5), f"{peak / memory:,.0f}\nFLOP/byte", linewidth=2)
    for y, (wire, speed) in zip((1.45, -0.45), wires.items(), strict=True):
        figures.box(ax, 2.1, y, f"{wire}\n{_si(speed)}B/s", figures.COLOURS[2], 3.8, 1.2)
        figures.arrow(ax, (4.0, y), (7.3, 0.5 + (y - 0.5) / 3), linewidth=2)
        ax.text(5.6, y + (0.15 if y > 0 else -0.3), f"{peak / speed:,.0f} FLOP/byte", ha="center")
    ax.set_title(f"{name}: what it can compute while one byte arrives", loc="left")
    figures.show(figure)


def roofline(measured: dict, peak: float, bandwidth: float) -> None:
    """Draw operations under the roof min(peak, bandwidth * intensity).

    measured: name -> (FLOPs, bytes, seconds). Each is coloured by the side of the ridge it lies on;
    raises AssertionError if one lies far above the roof: then a number or a label is wrong.
    """
    ridge = peak / bandwidth
    figure, ((ax,),) = figures.panels(1, 3.8, squeeze=False)
    intensities = [flops / nbytes for flops, nbytes, _ in measured.values()]
    left, right = min(intensities) / 2, max(max(intensities), ridge) * 3
    ax.plot([left, ridge, right], [bandwidth * left, peak, peak], color="black", linewidth=2)
    ax.axvline(ridge, color="0.6", linestyle=":")
    ax.text(ridge * 1.05, bandwidth * left, f"ridge: {ridge:.0f} FLOP per byte", color="0.3")
    for name, (flops, nbytes, seconds) in measured.items():
        x, y = flops / nbytes, flops / seconds
        roof = min(peak, bandwidth * x)
        assert y < 5 * roof, f"{name}: {y:.3g} FLOP/s, where {roof:.3g} is the roof"
        ax.plot(x, y, "o", color=BOUND["memory" if x < ridge else "compute"], markersize=7)
        to, ha = ((-6, 6), "right") if y > roof else ((6, -12), "left")  # off the line
        ax.annotate(name, (x, y), to, textcoords="offset points", fontsize=8, ha=ha)
    ax.set(xscale="log", yscale="log", xlabel="FLOPs per byte of memory traffic")
    ax.set(ylabel="FLOP/s", xlim=(left, right), ylim=(bandwidth * left / 3, peak * 3))
    ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: _si(value)))
    figures.show(figure)


def third_roof(formulas: dict, counted: dict, machines: dict[str, float]) -> None:
    """Draw the FLOPs that a strategy does per number sent, over what one may choose.

    formulas: strategy -> function of the knob; counted: strategy -> (knob, FLOPs per number sent).
    machines: name -> FLOPs it can do while one number is sent; above that line the wire waits for
    the matrix units, below it is the other way round.
    Raises AssertionError if a counted point is not on the line of its name.
    """
    figure, ((ax,),) = figures.panels(1, 5.2, squeeze=False)
    knobs = [2**k for k in range(5, 18)]
    lines = {}  # what a formula gives -> the strategies that share it: one line
    for name, formula in formulas.items():
        lines.setdefault(tuple(formula(x) for x in knobs), []).append(name)
    for colour, (y, names) in zip(figures.LINES, lines.items(), strict=False):
        ax.plot(knobs, y, color=colour, linewidth=2, label=", ".join(names))
        for name in (name for name in names if name in counted):
            knob, flops = counted[name]
            right = formulas[name](knob)
            assert abs(flops / right - 1) < 0.02, f"{name}: {flops}, not {right}"
            ax.plot(knob, flops, "o", color=colour, markersize=9, markeredgecolor="black")
            place = {"xytext": (-6, 6), "textcoords": "offset points", "ha": "right"}
            ax.annotate(name, (knob, flops), fontsize=8, **place)
    near = []  # lines so near to each other that they have one label, below them
    ordered = sorted(machines, key=machines.get)
    for name, above in zip(ordered, [*ordered[1:], None], strict=True):
        flops = machines[name]
        ax.axhline(flops, color="0.6", linewidth=1, zorder=0)
        near.append(name)
        if above and machines[above] < 1.3 * flops:
            continue
        y, va = (flops * 1.06, "bottom") if len(near) == 1 else (machines[near[0]] / 1.06, "top")
        high = flops > formulas["DP"](knobs[-1]) / 5  # on the right it would meet the lines
        x, ha = (knobs[0] * 1.1, "left") if high else (knobs[-1], "right")
        ax.text(x, y, "; ".join(near), ha=ha, va=va, fontsize=8, color="0.25")
        near = []
    ax.set(xscale="log", yscale="log", xlim=(knobs[0], knobs[-1]))
    ax.set(xlabel="tokens per rank (DP, FSDP, CP), hidden width per rank (TP), layers x width (PP)")
    ax.set_ylabel("FLOPs per number sent")
    ax.set_title(
        "dots: counted here. Above the line of a machine a strategy computes, below it waits"
    )
    ax.legend(loc="upper left", fontsize=8)
    figures.show(figure)


def _si(value: float) -> str:
    """989e12 -> "989 T"."""
    for factor, letter in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= factor:
            return f"{value / factor:.3g} {letter}"
    return f"{value:.3g} "
