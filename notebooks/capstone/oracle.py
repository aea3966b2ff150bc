"""What one process computes in a step of one_process.py, by hand in float64: no autograd, no torch.

Weights and gradients are dicts of arrays, with the names of Net's parameters.
"""

import numpy as np

LEARNING_RATE, MOMENTUM = 0.1, 0.9
Weights = dict[str, np.ndarray]


def forward(weights: Weights, buffers: Weights, x: np.ndarray) -> tuple[np.ndarray, ...]:
    """x: (points, 2). Returns the input of each layer and the logits, (points, 3)."""
    x = (x - buffers["mean"]) / buffers["std"]
    hidden = np.tanh(x @ weights["hidden.weight"].T + weights["hidden.bias"])
    return x, hidden, hidden @ weights["out.weight"].T + weights["out.bias"]


def gradient(weights: Weights, buffers: Weights, x, y, count: float) -> Weights:
    """Of the cross-entropy, summed over the points with a label (y >= 0), divided by `count`.

    d loss / d logits = softmax(logits) - one_hot(y); the rest is the chain rule.
    """
    inputs, hidden, logits = forward(weights, buffers, x)
    error = np.exp(logits - logits.max(axis=1, keepdims=True))
    error /= error.sum(axis=1, keepdims=True)
    error[np.arange(len(y)), y.clip(0)] -= 1
    error *= (y >= 0)[:, None] / count
    below = (error @ weights["out.weight"]) * (1 - hidden**2)
    return {
        "hidden.weight": below.T @ inputs,
        "hidden.bias": below.sum(axis=0),
        "out.weight": error.T @ hidden,
        "out.bias": error.sum(axis=0),
    }


def correct(weights: Weights, buffers: Weights, x, y) -> np.ndarray:
    """Whether each point gets its label: bools of shape (points,)."""
    return forward(weights, buffers, x)[-1].argmax(axis=1) == y


def momentum_step(velocity: Weights, gradients: Weights) -> Weights:
    """The velocity after a step of SGD; the weights then move by -LEARNING_RATE times this."""
    return {name: MOMENTUM * velocity[name] + g for name, g in gradients.items()}


def flat(tensors: Weights) -> np.ndarray:
    """All numbers in one array, in the order of their names."""
    return np.concatenate([tensors[name].ravel() for name in sorted(tensors)]).astype(float)


def far(actual: Weights, expected: Weights, tolerance: float = 1e-4) -> bool:
    """Whether they differ by more than `tolerance` times the norm of `expected`.

    fp32 rounds to 6e-8; sums of 24 points in another order stay below 1e-5.
    """
    a, b = flat(actual), flat(expected)
    return not np.linalg.norm(a - b) <= tolerance * np.linalg.norm(b)  # so that NaN is far


def times(actual: Weights, expected: Weights) -> float | None:
    """The factor between them if there is one, or else None."""
    a, b = flat(actual), flat(expected)
    factor = a @ b / (b @ b)
    return factor if np.linalg.norm(a - factor * b) <= 1e-4 * np.linalg.norm(a) else None
