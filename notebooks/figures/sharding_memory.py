"""Pictures of chapter 8: where the bytes are, and what each stage of ZeRO leaves on a rank."""

from collections.abc import Mapping, Sequence

from matplotlib.patches import Rectangle

from figures import COLOURS, KINDS, NOBODY, bars, canvas, curves, panels, show

# From the bottom of a bar to its top: what is always there comes first.
ORDER = {kind: KINDS[kind] for kind in ("parameters", "optimizer", "gradients", "activations")}
BYTES = {"parameters": 4, "gradients": 4, "optimizer": 8}  # for each number, float32 and AdamW


def inventory(events: Sequence[tuple[str, Mapping]], fullest: Mapping[str, Mapping]) -> None:
    """Left: bytes by kind after each event of a step. Right: at the fullest of these, by batch."""
    figure, (left, right) = panels(2, 3.6, width_ratios=(3, 2))
    everything = {event: _megabytes(sizes) for event, sizes in events}
    bars(everything, ORDER, left, ylabel="MB", title="one step, 256 images")
    left.tick_params(axis="x", rotation=90)
    left.get_legend().remove()
    peaks = {batch: _megabytes(sizes) for batch, sizes in fullest.items()}
    bars(peaks, ORDER, right, xlabel="images", title="the fullest of these moments")
    right.legend(loc="upper left")
    # What the labels claim: the batch moves the activations, and nothing that outlives a step.
    assert len({(s["parameters"], s["optimizer"]) for s in peaks.values()}) == 1
    grown = [s["activations"] for s in peaks.values()]
    assert grown == sorted(grown), "a larger batch keeps more"
    show(figure)


def zero(holds: Mapping[str, Mapping[str, Sequence[Sequence[int]]]]) -> None:
    """Which shards each rank holds: stage -> kind -> for each rank, the numbers of the shards.

    A cell's colour is the rank that looks after this shard; a white cell is not there.
    """
    figure, ax = canvas(2.6, (-1.5, 4 * 5.4), (-0.75, 4.3))
    totals = []
    for stage, (title, kinds) in enumerate(holds.items()):
        for y, (kind, ranks) in enumerate(kinds.items()):
            for rank, shards in enumerate(ranks):
                for shard in range(len(ranks)):
                    corner = (5.4 * stage + 1.25 * rank + 0.25 * shard, 2.2 - y)
                    colour = COLOURS[shard] if shard in shards else NOBODY
                    box = Rectangle(corner, 0.25, 0.75, facecolor=colour, edgecolor="0.6", lw=0.5)
                    ax.add_patch(box)
            if stage == 0:
                ax.text(-0.2, 2.57 - y, kind, ha="right", va="center", fontsize=8)
        for rank in range(len(ranks)):
            ax.text(5.4 * stage + 1.25 * rank + 0.5, 3.1, rank, ha="center", fontsize=8)
        ax.text(5.4 * stage + 2.4, 3.7, title, ha="center", weight="bold")
        totals.append(sum(BYTES[k] * len(r[0]) / len(r) for k, r in kinds.items()))
        ax.text(
            5.4 * stage + 2.4, -0.45, f"{totals[-1]:g} bytes per number", ha="center", fontsize=8
        )
    ax.text(-0.2, 3.1, "rank", ha="right", fontsize=8)
    assert totals == sorted(set(totals), reverse=True), "each stage holds less than the one before"
    show(figure)


def stages(held: Mapping[str, Mapping[str, int]], ranks: Sequence[int]) -> None:
    """Left: bytes that a rank holds, stage by stage. Right: bytes per parameter, by ranks."""
    figure, (left, right) = panels(2, 3.2, width_ratios=(3, 2))
    measured = {stage: _megabytes(sizes) for stage, sizes in held.items()}
    bars(measured, ORDER, left, ylabel="MB", title="held by each of 4 ranks, measured")
    lines = {}
    for number, stage in enumerate(held):
        cut = sum(size for k, size in BYTES.items() if number >= _cut_from(k))
        lines[stage] = (ranks, [16 - cut + cut / n for n in ranks])
        # The line, at 4 ranks, must be the bar: what was measured over all that one rank needs.
        here = sum(held[stage].values()) / sum(held["data parallel"].values()) * 16
        assert abs(here - (16 - cut + cut / 4)) < 0.01, stage
    curves(lines, right, xlabel="ranks", ylabel="bytes per parameter", title="more ranks")
    right.set(xscale="log", ylim=0)
    right.legend(loc="upper right", bbox_to_anchor=(1, 0.95), fontsize=8)
    right.set_xticks([1, 4, 16, 64], ["1", "4", "16", "64"])
    right.minorticks_off()
    show(figure)


def _cut_from(kind: str) -> int:
    return {"optimizer": 1, "gradients": 2, "parameters": 3}[kind]


def _megabytes(sizes: Mapping[str, int]) -> dict[str, float]:
    return {kind: size / 1e6 for kind, size in sizes.items()}
