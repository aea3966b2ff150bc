"""Train a tied pipeline of two stages that does not add up the gradients of its two copies."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))  # gpt_equivalence, which finds the rest

from gpt_equivalence import batches, settings_of, spread
from optimizer import make_optimizer
from pipeline import Pipeline
from replicas import check_replicas
from runtime import distributed_worker
from step import train_step


def main() -> None:
    Pipeline.add_tied_gradients = lambda pipeline: None
    settings = settings_of("--pp 2 --tied")
    with distributed_worker("cpu") as worker:
        mesh, model, pipeline = spread(settings, worker)
        optimizer = make_optimizer(model, settings)
        check_replicas(model, 0, worker)  # they start equal
        for step, (x, y) in enumerate(batches(), start=1):
            train_step(model, pipeline, x, y, optimizer, mesh, settings)
            if step == 2:
                check_replicas(model, step, worker)


if __name__ == "__main__":
    main()
