"""The pictures of chapter 0: what can be split, what fits, and what to choose."""

from collections.abc import Callable, Sequence

import matplotlib.pyplot as plt

from figures import LINES, WIDTH, arrow, box, canvas, cell, curves, show

# How two ranks cut the batch, the state, the computation: into "rows", "columns", or not at all;
# and what they send each other.
STRATEGIES = {
    "data parallel\n(DDP)": ("rows", "", "", "gradients,\nonce per step"),
    "sharded data\nparallel (FSDP)": (
        "rows",
        "columns",
        "",
        "weights before\neach layer,\ngradients after",
    ),
    "tensor\nparallel": ("", "columns", "columns", "activations,\nseveral times\nper layer"),
    "pipeline\nparallel": ("", "rows", "rows", "activations\nwhere the model\nis cut"),
    "context\nparallel": ("columns", "", "", "keys and values\nin each attention,\ngradients"),
}


def strategies() -> None:
    """Five ways to split the training of a model over two ranks, a row for each."""
    figure, axes = plt.subplots(
        len(STRATEGIES), 4, figsize=(WIDTH, 8.2), width_ratios=(1, 1, 1, 1.3)
    )
    for row, (name, (batch, state, computed, sent)) in zip(axes, STRATEGIES.items(), strict=True):
        per_rank = [1 / 2 if cut else 1 for cut in (batch, state, computed)]
        assert per_rank[0] * per_rank[2] == 1 / 2, f"{name}: two ranks do half of the work each"
        assert (per_rank[1] == 1) == (not state)
        _squares(row[0], batch, "tokens", "samples")
        _squares(row[1], state, "width", "layers")
        _squares(row[2], computed, "width", "layers")
        row[0].text(-0.4, 0.5, name, transform=row[0].transAxes, ha="right", va="center")
        row[3].text(0.05, 0.5, sent, transform=row[3].transAxes, va="center")
        row[3].axis("off")
    titles = ("batch", "state held", "layers computed", "what is sent")
    for ax, title in zip(axes[0], titles, strict=True):
        ax.set_title(title)
    key = axes[0][3]
    for i, (words, owners) in enumerate((("rank 0", [0]), ("rank 1", [1]), ("both", [0, 1]))):
        cell(key, 0.05 + 0.34 * i, 0.95, "", owners, 0.08, 0.12)
        key.text(0.15 + 0.34 * i, 1.01, words, va="center", fontsize=8)
    key.set(xlim=(0, 1), ylim=(0, 1.1))
    show(figure)


def _squares(ax, cut: str, xlabel: str, ylabel: str) -> None:
    for i in range(4):
        for j in range(4):
            owners = {"rows": [i // 2], "columns": [j // 2]}.get(cut, [0, 1])
            cell(ax, j, 3 - i, "", owners)
    ax.set(xlim=(0, 4), ylim=(0, 4), xticks=[], yticks=[], aspect="equal")
    ax.set_xlabel(xlabel, fontsize=8, labelpad=1)
    ax.set_ylabel(ylabel, fontsize=8, labelpad=1)
    ax.spines[:].set_visible(False)


def state_per_rank(bytes_per_rank: Callable, gpu: float = 80e9) -> None:
    """The training state of three models on one rank, over the number of ranks.

    bytes_per_rank(parameters, ranks, strategy): strategy is "data parallel" or "fsdp".
    """
    ranks = [2**k for k in range(10)]
    figure, ax = plt.subplots(figsize=(WIDTH, 3.8))
    lines, labels = {}, []
    for billions, colour in zip((1, 7, 70), LINES, strict=False):
        for strategy, style in (("data parallel", ":"), ("fsdp", "-")):
            gb = [bytes_per_rank(billions * 1e9, n, strategy) / 1e9 for n in ranks]
            assert (gb[-1] == gb[0]) == (strategy == "data parallel"), "only this one stays level"
            lines[f"{billions}, {strategy}"] = (ranks, gb, style)
            labels.append((f"{billions} B, {'FSDP' if style == '-' else 'DDP'}", gb[-1], colour))
    curves(lines, ax, xscale="log", yscale="log", xlabel="ranks")
    ax.get_legend().remove()  # each line has its name at its end
    for line, (label, end, colour) in zip(ax.get_lines(), labels, strict=True):
        line.set_color(colour)
        ax.text(ranks[-1] * 1.1, end, label, color=colour, va="center")
    ax.axhline(gpu / 1e9, color="black", linewidth=1)
    words = f"memory of a GPU with {gpu / 1e9:.0f} GB"
    ax.text(512, 0.85 * gpu / 1e9, words, ha="right", va="top")
    ax.set_ylabel("training state per rank (GB)")
    ax.set_xticks([1, 8, 64, 512], ["1", "8", "64", "512"])
    ax.set_yticks([0.1, 1, 10, 100, 1000], ["0.1", "1", "10", "100", "1000"])
    ax.minorticks_off()
    show(figure)


QUESTION, ANSWER = "#eeeeee", "#cfe5c8"
# A question, where "yes" leads, and what "no" means.
STEPS = (
    ("16 x parameters + activations\nfit on one GPU, and it is\nfast enough?", "one process", "no"),
    ("They fit, but it is\ntoo slow?", "data parallel (DDP)", "they do not fit"),
    (
        "They fit on one GPU with\nsmaller micro-batches, bf16,\nactivation checkpointing?",
        "one process or DDP,\nwith these three",
        "no",
    ),
    ("16 x parameters / ranks,\none whole layer and the\nactivations fit?", "FSDP", "no"),
    ("Sequences so long that the\nactivations do not fit?", "FSDP + context parallel", "no"),
    (
        "One layer too large, or a batch\ntoo small for so many ranks,\nwith fast links in a node?",
        "FSDP + tensor parallel\nwithin each node",
        "no: slow links\nbetween nodes",
    ),
)


def choice(steps: Sequence[tuple[str, str, str]] = STEPS) -> None:
    """From the numbers to a strategy: questions down the left side, answers on the right."""
    bottom = -1.5 * len(steps)
    figure, ax = canvas(1.5 * len(steps), (-1.9, 6.1), (bottom - 0.6, 0.6))
    for i, (question, answer, otherwise) in enumerate(steps):
        y = -1.5 * i
        box(ax, 0, y, question, QUESTION, 3.4, 0.9)
        box(ax, 4.6, y, answer, ANSWER, 2.7, 0.9)
        arrow(ax, (1.7, y), (3.25, y), "yes")
        arrow(ax, (0, y - 0.45), (0, y - 1.05), otherwise)
    box(ax, 0, bottom, "pipeline parallel across nodes,\nwith the others inside them", ANSWER, 3.4)
    show(figure)
