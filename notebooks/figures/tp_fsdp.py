"""The pictures of chapter 14: what two axes send."""

from collections.abc import Mapping, Sequence

import figures

COLOUR = dict(zip(("64 x 1", "8 x 8", "1 x 64"), figures.LINES, strict=False))


def arrangements(gigabytes: Mapping[str, Sequence[float]], tokens: Sequence[int]) -> None:
    """Draw what a rank sends, over the tokens of a step; dotted: less than a sequence per shard.

    gigabytes: "dp_shard x tp" -> GB for each number of `tokens`. A sequence has 4096 of them.
    """
    assert len(set(gigabytes["64 x 1"])) == 1, "FSDP alone does not depend on the tokens"
    assert gigabytes["1 x 64"][-1] > gigabytes["8 x 8"][-1] > gigabytes["64 x 1"][-1]
    figure, ax = figures.panels(1)
    for name, values in gigabytes.items():
        shards = int(name.split()[0])
        first = next(i for i, t in enumerate(tokens) if t >= 4096 * shards)
        ax.plot(tokens, values, ":", color=COLOUR[name])
        style = {"color": COLOUR[name], "markersize": 4, "label": name}
        ax.plot(tokens[first:], values[first:], "o-", **style)
    ax.set(xscale="log", yscale="log", xlabel="tokens in a step", ylabel="GB sent by a rank")
    ax.set_title("dotted: less than one sequence of 4096 tokens per shard")
    ax.legend(title="dp_shard x tp")
    figures.show(figure)
