"""Run transformer_basics/generate.py once for each way to choose tokens, in one job.

Arguments: FILE; then generate.py's. Rank R saves way -> its token ids as FILE.R.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "transformer_basics"))

import generate
import torch
from runtime import distributed_worker

HOW = {
    "greedy": ("--temperature", "0"),
    "drawn": ("--temperature", "3", "--top-k", "0"),
    "seed": ("--temperature", "3", "--top-k", "0", "--seed", "1"),
}


def main(file: str, *flags: str) -> None:
    of_script, written = generate.generate, []

    def keep(*args, **options) -> torch.Tensor:
        written.append(of_script(*args, **options))
        return written[-1]

    generate.generate = keep
    with distributed_worker("cpu") as worker:
        for options in HOW.values():
            sys.argv[1:] = [*flags, *options]
            generate.write(generate.parse_args(), worker)
        found = {how: tokens[0].tolist() for how, tokens in zip(HOW, written, strict=True)}
        torch.save(found, f"{file}.{worker.rank}")


if __name__ == "__main__":
    main(*sys.argv[1:])
