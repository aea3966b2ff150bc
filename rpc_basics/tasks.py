"""Two things to learn, small enough for a laptop: handwritten digits, and Python's own source text.

Both are rows of inputs with one class each, so one loss and one accuracy fit both.
"""

import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits as read_digits
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector

TASKS = ("digits", "text")
CONTEXT = 8  # characters from which the next one is guessed
CHARACTERS = 128  # ASCII


@dataclass(frozen=True)
class Task:
    """inputs: (n, 64) fp32 pixels, or (n, 8) int64 characters; labels: (n,) int64."""

    name: str
    inputs: Tensor
    labels: Tensor
    test_inputs: Tensor
    test_labels: Tensor

    def make_model(self, seed: int) -> nn.Module:
        """With the same first values wherever it is made."""
        torch.manual_seed(seed)
        if self.name == "digits":
            return nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10))
        return nn.Sequential(
            nn.Embedding(CHARACTERS, 16),
            nn.Flatten(),
            nn.Linear(CONTEXT * 16, 64),
            nn.Tanh(),
            nn.Linear(64, CHARACTERS),
        )

    def batch(self, size: int, *numbers: int) -> tuple[Tensor, Tensor]:
        """`size` rows drawn at random; the same numbers (seed, step ...) draw the same rows."""
        generator = torch.Generator().manual_seed(hash(numbers))  # of integers: no secret in it
        rows = torch.randint(len(self.labels), (size,), generator=generator)
        return self.inputs[rows], self.labels[rows]

    def accuracy(self, model: nn.Module) -> float:
        """The share of the test rows whose class is found."""
        with torch.no_grad():
            return (model(self.test_inputs).argmax(1) == self.test_labels).float().mean().item()


def gradient_of(model: nn.Module, inputs: Tensor, labels: Tensor) -> tuple[Tensor, float]:
    """The gradient of the mean loss as one row of numbers (parameters,), fp32; and that loss."""
    loss = F.cross_entropy(model(inputs), labels)
    return parameters_to_vector(torch.autograd.grad(loss, list(model.parameters()))), loss.item()


def load_task(name: str) -> Task:
    """name: "digits", scikit-learn's 1,797 images; "text": modules of the standard library."""
    inputs, labels = load_digits() if name == "digits" else load_text()
    known = len(labels) * 4 // 5  # the rest are other writers' digits, and another module's text
    return Task(name, inputs[:known], labels[:known], inputs[known:], labels[known:])


def load_digits() -> tuple[Tensor, Tensor]:
    images, labels = map(torch.tensor, read_digits(return_X_y=True))
    return (images / 16).float(), labels


def load_text(length: int = 50_000) -> tuple[Tensor, Tensor]:
    """The first characters of a few modules, one after the other."""
    library = Path(sysconfig.get_path("stdlib"))
    modules = ("argparse.py", "dataclasses.py", "inspect.py", "pathlib.py", "threading.py")
    found = [library / name for name in modules if (library / name).is_file()]
    text = "".join(path.read_text(encoding="utf-8")[: length // len(found)] for path in found)
    characters = torch.tensor([min(ord(character), CHARACTERS - 1) for character in text])
    rows = characters.unfold(0, CONTEXT + 1, 1)
    return rows[:, :-1].contiguous(), rows[:, -1].contiguous()
