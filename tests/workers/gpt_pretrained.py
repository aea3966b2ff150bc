"""Load folders of Hugging Face's on several meshes of two ranks, and save what they compute.

Argument: where the tokens and the cases are (name -> settings of ours), and where the logits go.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "transformer_basics"))

import torch
from config import Settings
from parallelize import spread_model
from pretrained import copy_weights, read_config, read_weights
from runtime import distributed_worker

MESHES = {"--tp 2": {"tp": 2}, "--dp-shard 2": {"dp_shard": 2}, "--pp 2": {"pp": 2}}


def logits_on(mesh: dict, shape: dict, tokens: torch.Tensor, worker) -> torch.Tensor:
    sizes = {"layers": 2, "heads": 4, "dim": 24, "block_size": 32, "batch_size": 4}
    settings = Settings(**sizes, **shape, **mesh).on(worker.world_size)
    config = read_config(settings, token_count=50)
    _, model, pipeline = spread_model(config, settings, worker.device)
    copy_weights(model, read_weights(settings, config))
    with torch.no_grad():
        if not pipeline:
            return model(tokens)
        logits = pipeline.forward(tokens)
        if logits is None:
            logits = torch.empty(*tokens.shape, config.vocab_size)
        return pipeline.broadcast_from_last(logits)


def main(output: str) -> None:
    tokens, cases = torch.load(Path(output) / "tokens"), torch.load(Path(output) / "cases")
    with distributed_worker("cpu") as worker:
        found = {
            (case, name): logits_on(mesh, shape, tokens, worker)
            for case, shape in cases.items()
            for name, mesh in MESHES.items()
        }
        if worker.is_main:
            torch.save(found, Path(output) / "logits")


if __name__ == "__main__":
    main(*sys.argv[1:])
