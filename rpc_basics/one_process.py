"""The training of the synchronous parameter server in one process: what it must be equal to."""

import torch
from parameter_shard import Settings
from tasks import gradient_of, load_task
from torch import Tensor
from torch.nn.utils import parameters_to_vector


def compare(settings: Settings, vector: Tensor, means: dict[int, Tensor]) -> None:
    """Print the largest differences.

    vector: the parameters after all updates, (parameters,); means: by version, the gradients.
    """
    task = load_task(settings.data)
    model = task.make_model(settings.seed)
    first = parameters_to_vector(model.parameters()).detach().clone()
    optimizer = torch.optim.SGD(model.parameters(), lr=settings.lr, momentum=settings.momentum)
    largest = 0.0
    for step in range(settings.steps):
        inputs, labels = task.batch(settings.batch_size, settings.seed, step)
        gradient, _ = gradient_of(model, inputs, labels)
        if step in means:  # a server that was restarted has those since then
            largest = max(largest, (means[step] - gradient).abs().max().item())
        pieces = gradient.split([parameter.numel() for parameter in model.parameters()])
        for parameter, piece in zip(model.parameters(), pieces, strict=True):
            parameter.grad = piece.view_as(parameter)
        optimizer.step()
    trained = parameters_to_vector(model.parameters()).detach()
    moved = (trained - first).abs().max().item()
    difference = (vector - trained).abs().max().item()
    print(
        f"{len(means)} gradients and {len(vector):,} parameters, moved by up to {moved:.1e}\n"
        f"largest difference to one process: gradient {largest:.1e}, parameter {difference:.1e}",
        flush=True,
    )
