"""The pictures of chapter 3: what moves in an all_to_all."""

from collections.abc import Sequence

from matplotlib.patches import Rectangle

from figures import arrow, cell, digits, movie


def all_to_all(held: Sequence[Sequence], received: Sequence[Sequence[Sequence]]) -> None:
    """A movie of an all_to_all in rounds: on the left what ranks have, on the right what they get.

    held: for each rank its tensor, one number for each rank. received: for each rank what had
    arrived at the start and after each round, with 0 where nothing had.
    """
    world, rounds = len(held), len(received[0]) - 1
    held = [[int(v) for v in tensor] for tensor in held]
    received = [[[int(v) for v in tensor] for tensor in rank] for rank in received]
    for rank in range(world):
        assert received[rank][-1] == [held[source][rank] for source in range(world)], "transposed"
    right = world + 3.0

    def draw(ax, k: int) -> None:
        ax.text(world / 2, 0.7, "has", ha="center", va="center")
        ax.text(right + world / 2, 0.7, "gets", ha="center", va="center")
        said = f"round {k - 1} of {rounds - 1}" if k else "at the start"
        ax.text(world + 1.5, 0.7, said, ha="center", va="center", fontsize=10)
        for rank in range(world):
            ax.text(-0.2, -0.9 - 1.3 * rank, f"rank {rank}", ha="right", va="center")
            ax.text(right + world + 0.2, -0.9 - 1.3 * rank, f"rank {rank}", va="center")
            for place, value in enumerate(held[rank]):
                cell(ax, place, -1.4 - 1.3 * rank, str(value), digits(value))
            for source, value in enumerate(received[rank][k]):
                text, owners = (str(value), digits(value)) if value else ("", [])
                cell(ax, right + source, -1.4 - 1.3 * rank, text, owners)
                if k and value and not received[rank][k - 1][source]:  # it came in this round
                    start = (world + 0.1, -0.9 - 1.3 * source)
                    arrow(ax, start, (right - 0.1, -0.9 - 1.3 * rank), linewidth=1.5)
                    for x, y in ((rank, source), (right + source, rank)):  # from here, to there
                        corner = (x + 0.04, -1.36 - 1.3 * y)
                        outline = {"fill": False, "linewidth": 2, "zorder": 3}
                        ax.add_patch(Rectangle(corner, 0.92, 0.92, **outline))

    limits = (-1.2, right + world + 1.2), (-1.3 * world - 0.4, 1.1)
    movie(draw, rounds + 1, 2.4, *limits, stills=range(2, rounds + 1), seconds=1.2)
