"""Print the mesh and the text of a run, log its metrics, and write a sample at the end."""

import time
from functools import partial

import torch
import torch.distributed as dist
from alone import on_rank_0
from config import AXES, PRECISIONS, Settings
from data import bigram_loss
from flops import matmul_peak
from lora import flops_per_token
from metrics import Metrics, Throughput, check_finite, peak_memory
from model import GPT, GPTConfig
from runtime import Worker
from sampling import generate
from stages import second_copy
from step import torch_regions
from torch.distributed.device_mesh import DeviceMesh

MOST_COUNTED = 200_000_000  # tokens of a bigram model: rank 0 reads them, and other ranks wait


def describe(corpus, held_out, model: GPT, mesh: DeviceMesh, worker: Worker) -> None:
    """Rank 0 prints the mesh, the parameters that it holds, and the loss of a bigram model."""
    second = second_copy(model)  # counted on the first stage
    numbers_of_stage = sum(p.numel() for p in model.parameters() if p is not second)
    trained = [p for p in model.parameters() if p is not second and p.requires_grad]
    numbers_held = sum(p.to_local().numel() for p in model.parameters())
    stages = [None] * worker.world_size
    of_stage = (numbers_of_stage, sum(p.numel() for p in trained))
    dist.all_gather_object(stages, (mesh["pp"].get_local_rank(), of_stage))
    tokens = sum(len(shard.tokens) for shard in corpus.train)
    if worker.is_main:
        axes = "   ".join(f"{axis} {size}" for axis, size in zip(AXES, mesh.shape, strict=True))
        numbers, changing = map(sum, zip(*dict(stages).values(), strict=True))
        print(f"{axes}   {numbers:,} parameters, {numbers_held:,} on this rank")
        if changing < numbers:
            print(f"{changing:,} of {numbers:,} parameters are trained ({changing / numbers:.2%})")
        print(f"{tokens:,} tokens to train on", end=", ")
        print(f"{sum(len(shard.tokens) for shard in corpus.validation):,} held out", flush=True)
    vocab_size = corpus.tokenizer.vocab_size
    if vocab_size <= 4096 and tokens <= MOST_COUNTED:  # pairs of tokens are counted in a table
        count = partial(bigram_loss, corpus.train, *held_out, vocab_size)
        loss = on_rank_0(count, worker, "counting pairs of tokens, for the loss of a bigram model")
        if worker.is_main:
            print(f"a bigram model has a loss of {loss:.3f} on the held-out windows", flush=True)


class Report:
    """The log of a run: one line, and one JSON object, for each call."""

    def __init__(
        self, settings: Settings, config: GPTConfig, step: int, saved_run: dict, worker: Worker
    ):
        """step: the steps done by the checkpoint that this run continues; saved_run: its run."""
        self.metrics = Metrics(
            settings.output_dir, step, settings.steps, worker, settings.tensorboard
        )
        self.throughput, self.device = Throughput(step), worker.device
        self.tokens_per_step = settings.tokens_per_step
        self.flops_per_token = flops_per_token(config, settings.block_size, settings.lora_rank)
        peak_of_rank = matmul_peak(worker.device, PRECISIONS[settings.precision])
        self.ranks, self.peak = worker.world_size, worker.world_size * peak_of_rank
        if worker.is_main:
            print(
                "mfu: FLOP as PaLM counts them (no recomputation), over the measured "
                f"{peak_of_rank / 1e12:.3g} TFLOP/s of a rank's matrix products",
                flush=True,
            )
        self.started = time.perf_counter()
        self.saved_cost = {name: saved_run.get(name, 0.0) for name in ("hours", "rank_hours")}
        if worker.device.type != "cpu":  # its matrices, 400 to 800 MB, are no memory of training
            torch.accelerator.empty_cache()
            torch.accelerator.reset_peak_memory_stats(worker.device)

    def training(self, step: int, epoch: int, loss: float, lr: float, grad_norm: float) -> None:
        """Log a training step. Raises `UserError` if loss or norm is no number."""
        check_finite(step, loss, grad_norm)
        tokens_per_second = self.throughput.stop(step) * self.tokens_per_step
        self.metrics.log(
            step,
            epoch,
            loss=loss,
            lr=lr,
            grad_norm=grad_norm,
            tokens_per_second=tokens_per_second,
            mfu=tokens_per_second * self.flops_per_token / self.peak,
            **peak_memory(self.device),
        )

    def validation(self, step: int, epoch: int, loss: float) -> None:
        self.metrics.log(step, epoch, validation_loss=loss)

    def training_goes_on(self, step: int) -> None:
        """Restart the clock of tokens/s, which leaves out evaluation and saving."""
        self.throughput.start(step)

    def cost(self) -> dict[str, float]:
        """Hours of the run, and ranks x hours, from its first start to now.

        A checkpoint keeps them. Time after the last checkpoint of a killed run is not counted.
        """
        hours = (time.perf_counter() - self.started) / 3600
        return {
            "hours": self.saved_cost["hours"] + hours,
            "rank_hours": self.saved_cost["rank_hours"] + self.ranks * hours,
        }

    def summary(self, step: int, epoch: int) -> None:
        """All ranks call this at the end: log the tokens and the cost of the run.

        Also the peak memory of the rank that needed most.
        """
        peaks = peak_memory(self.device)
        largest = torch.tensor(list(peaks.values()), dtype=torch.float64)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        of_ranks = {f"largest_{name}": x for name, x in zip(peaks, largest.tolist(), strict=True)}
        tokens = step * self.tokens_per_step
        self.metrics.log(step, epoch, tokens=tokens, **self.cost(), **of_ranks)

    def close(self) -> None:
        self.metrics.close()


def write_sample(
    model, pipeline, corpus, mesh: DeviceMesh, settings: Settings, worker: Worker
) -> None:
    """Rank 0 prints how the model continues --prompt; all ranks compute."""
    prompt = torch.tensor([corpus.tokenizer.of_prompt(settings.prompt)], device=worker.device)
    model.eval()
    with torch_regions(settings, mesh):
        tokens = generate(
            model,
            pipeline,
            prompt,
            settings.sample,
            seed=settings.seed,
            length_multiple=settings.length_multiple,
            cp=mesh["cp"],
        )
    if worker.is_main and settings.sample:
        print(f"---- {settings.sample} tokens after {settings.prompt!r}:")
        print(corpus.tokenizer.decode(tokens[0].tolist()[len(corpus.tokenizer.begins) :]))
