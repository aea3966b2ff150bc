"""The picture of chapter 11: what a T5 is made of, and where its one embedding matrix is used."""

from collections.abc import Mapping

from figures import COLOURS, LINES, arrow, box, canvas, show

BLOCK, MATRIX = COLOURS[0], COLOURS[1]


def anatomy(sizes: Mapping[str, int], uses: Mapping[str, bool]) -> None:
    """sizes: parameters by name, as counted. uses: place -> whether it holds the shared matrix."""
    figure, ax = canvas(3.9, (0.3, 9.2), (-0.6, 5.4))
    shown = {}
    for x, side in ((2, "encoder"), (6.2, "decoder")):
        box(ax, x, 1.2, "embed_tokens", MATRIX)
        for i, y in enumerate((2.4, 3.6)):
            name = f"{side}.block.{i}"
            shown[name] = sizes[name]
            box(ax, x, y, f"{name}\n{sizes[name]:,}", BLOCK)
        arrow(ax, (x, 1.6), (x, 2.0))
        arrow(ax, (x, 2.8), (x, 3.2))
    box(ax, 6.2, 4.8, "lm_head", MATRIX)
    arrow(ax, (6.2, 4.0), (6.2, 4.4))
    for y in (2.4, 3.6):  # each decoder block reads what the encoder has made
        arrow(ax, (3.15, 3.6), (5.05, y), linestyle=":")
    whole = sum(sizes.values())
    text = f"shared.weight, one matrix: {sizes['shared.weight']:,} of {whole:,} parameters"
    box(ax, 4.1, -0.1, text, MATRIX, width=6.4)
    for x in (2, 6.2):
        arrow(ax, (x, 0.3), (x, 0.8), color=LINES[1])
    ax.text(4.1, 2.1, "output of\nthe encoder", ha="center", va="center")
    for y, colour, words in (
        (5.05, BLOCK, "a block, and its parameters"),
        (4.65, MATRIX, "the shared embedding matrix, used"),
    ):
        ax.plot(0.95, y, "s", color=colour, markersize=10)
        ax.text(1.15, y, words, va="center")
    style = {"color": LINES[1], "connectionstyle": "arc3,rad=0.35"}
    arrow(ax, (7.2, 0.3), (7.35, 4.8), **style)
    # The boxes in the matrix's colour hold it, and the decoder's blocks are the larger ones.
    assert set(uses) == {"encoder.embed_tokens", "decoder.embed_tokens", "lm_head"}
    assert all(uses.values())
    assert min(shown["decoder.block.0"], shown["decoder.block.1"]) > shown["encoder.block.0"]
    show(figure)
