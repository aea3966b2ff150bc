"""Run transformer_basics/generate.py, and save the token ids of each rank as FILE.RANK.

Arguments: FILE; then generate.py's.
"""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "transformer_basics"))

import generate
import torch

file, of_script = sys.argv.pop(1), generate.generate


def save(*args, **options) -> torch.Tensor:
    tokens = of_script(*args, **options)
    torch.save(tokens, f"{file}.{os.environ.get('RANK', 0)}")
    return tokens


generate.generate = save
generate.main()
