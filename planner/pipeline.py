"""The stages of a pipeline: their layers, their weights."""

import numpy as np
from shapes import Mesh, Model, Number
from stacks import Stack


def stage_layers(model: Model, mesh: Mesh, stack: Stack) -> tuple[Number, Number, Number]:
    """Layers of the first stage, of the fullest stage between, and of the last stage.

    Equal numbers of layers. Where pp does not divide them but divides L + 2, embedding and output
    layer take a layer's place each, as in Llama 3 and BLOOM; else early stages have one layer more.
    Or (`balanced`) stages take blocks until they pass their share of all weights, the output layer
    included. [nanotron's build_model]
    """
    layers, pp = model.layers, mesh.pp
    if not stack.balanced:
        fewest, left = np.divmod(layers, pp)
        most = fewest + (left > 0)
        with_tables = (left > 0) & ((layers + 2) % pp == 0)
        first = np.where(with_tables, fewest, most)
        return first, np.where((left == 1) & ~with_tables, fewest, most), fewest
    head = model.embedding_parameters / model.layer_parameters
    share = (layers + head) / pp
    extra = (share % 1) * (pp - 1) >= 1
    first = np.minimum(layers, np.floor(share) + 1)
    between = np.maximum(1, np.floor(share) + extra)
    last = np.maximum(0, layers - np.floor((pp - 1) * share) - 1)
    return tuple(np.where(pp == 1, layers, n) for n in (first, between, last))


def stage_parameters(model: Model, mesh: Mesh, stack: Stack) -> tuple[Number, Number, Number]:
    """Weights of a rank before DP shards them, for the stages of `stage_layers`."""
    tables = np.where(mesh.pp == 1, 2 - model.tied, 1)
    with_tables = zip(stage_layers(model, mesh, stack), (tables, 0, tables), strict=True)
    layer, table = model.layer_parameters, model.embedding_parameters
    return tuple((layers * layer + tables * table) / mesh.tp for layers, tables in with_tables)


def most_parameters(model: Model, mesh: Mesh, stack: Stack) -> Number:
    """Weights of the rank that has most of them: of the first stage, or of one between."""
    first, between, _ = stage_parameters(model, mesh, stack)
    return np.where(mesh.pp > 2, np.maximum(first, between), first)
