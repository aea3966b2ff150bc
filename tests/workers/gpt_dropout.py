"""Run transformer_basics/train.py with dropout after each MLP, and save what was dropped.

Arguments: after which step SIGTERM comes (0: never), the folder for masks_RANK, and train.py's own.
"""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "transformer_basics"))

import model
import torch
from torch import nn

folder, masks = Path(sys.argv.pop(2)), {}


class DroppingMLP(model.MLP):
    """Keeps its parent's names, for the plan of tensor parallelism."""

    def forward(self, x_BTC):
        x_BTC = nn.functional.dropout(super().forward(x_BTC), 0.5, self.training)
        masks.setdefault("first step" if self.training else "evaluation", x_BTC == 0)
        return x_BTC


model.MLP = DroppingMLP
import gpt_resume  # noqa: E402, F401 (runs it)

torch.save(masks, folder / f"masks_{os.environ['RANK']}")
