r"""Run a training script as a Ray Train job: the script that torchrun runs, unchanged.

    pip install -r requirements-clusters.txt
    python clusters/ray/train.py ddp_basics/train.py --epochs 2 --output-dir runs/digits
    RAY_ADDRESS=auto python clusters/ray/train.py --workers 16 --gpu \
        fsdp_basics/train.py --output-dir /shared/runs/vit      # on any host of a Ray cluster

The script's own arguments follow its name. Without RAY_ADDRESS, Ray starts here and ends with the
job. Look at train() and run_script(): like an agent of torchrun, a worker of Ray Train sets a
rank's variables and starts the rank. Kill a rank or a worker: Ray restarts all ranks, and the
script continues from its last checkpoint.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

import torch.distributed as dist


def fail(sentence: str) -> NoReturn:
    print(f"train.py: error: {sentence}", file=sys.stderr)
    sys.exit(2)


os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # else Ray sends statistics home
os.environ.setdefault(
    "RAY_raylet_start_wait_time_s", "120"
)  # else 30: not enough on a busy machine
try:
    import ray.train
    from ray.train import Checkpoint, CheckpointUploadMode, FailureConfig, RunConfig, ScalingConfig
    from ray.train.collective import broadcast_from_rank_zero
    from ray.train.torch import TorchConfig, TorchTrainer
except ImportError:
    fail("Ray is not installed: pip install -r requirements-clusters.txt")


def main() -> None:
    args = parse_args()
    address = os.environ.get("RAY_ADDRESS", "local")  # local: our own cluster, which ends with us
    quiet = ray.LoggingConfig(log_level="ERROR")  # for Ray's own processes, not for the ranks
    try:
        context = ray.init(
            address, include_dashboard=False, logging_level="error", logging_config=quiet
        )
    except ConnectionError as error:
        fail(f"RAY_ADDRESS={address}: {error}")
    with context:
        kind = "GPU" if args.gpu else "CPU"  # each worker takes one
        total = int(ray.cluster_resources().get(kind, 0))
        if args.workers > total:  # Ray would wait for more hosts, for ever
            fail(f"--workers {args.workers} needs {args.workers} {kind}s, but Ray has {total}")
        try:
            tell(train(args))
        except ray.train.TrainingFailedError as error:
            sys.exit(status_of(error))


def train(args) -> ray.train.Result:
    """Run the training, with one worker per rank; when a worker fails, Ray restarts all."""
    output_dir = args.output_dir
    command = [sys.executable, "-u", args.script, *args.arguments, "--output-dir", str(output_dir)]
    trainer = TorchTrainer(
        run_script,
        train_loop_config={
            "command": command,
            "directory": os.getcwd(),
            "output_dir": output_dir,
        },
        scaling_config=ScalingConfig(num_workers=args.workers, use_gpu=args.gpu),
        torch_config=TorchConfig(backend="gloo"),  # for the workers; the ranks make their own group
        run_config=RunConfig(
            storage_path=str(output_dir.parent),
            name=output_dir.name,  # Ray's files lie next to the script's files
            failure_config=FailureConfig(max_failures=args.max_failures),
            callbacks=[TellFailures()],
            logging_config=ray.train.LoggingConfig("CRITICAL"),
        ),
    )
    return trainer.fit()


def run_script(config: dict) -> None:
    """In each worker: start the script as a rank, and report its checkpoints to Ray Train.

    The rank is a process, because Ray calls this function in a thread, where Python cannot handle
    signals, and so that a rank dies as under torchrun. Ray has set RANK, WORLD_SIZE, LOCAL_RANK,
    LOCAL_WORLD_SIZE and MASTER_ADDR. The workers' own group uses MASTER_PORT, so rank 0's worker
    serves another store in which the ranks meet, as torchrun's agent does.

    Raises `subprocess.CalledProcessError` when the script fails; Ray then decides what to do.
    """
    first, saves = os.environ["RANK"] == "0", config["output_dir"] / "checkpoints"
    store = None
    if first:
        store = dist.TCPStore(os.environ["MASTER_ADDR"], 0, is_master=True, wait_for_workers=False)
    port = broadcast_from_rank_zero(store.port if first else None)
    told = os.environ | {"MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    script = subprocess.Popen(END_WITH_ME + config["command"], cwd=config["directory"], env=told)
    reported, running = 0, True
    while running:
        with suppress(subprocess.TimeoutExpired):
            script.wait(timeout=1)
        if script.returncode:
            raise subprocess.CalledProcessError(script.returncode, config["command"])
        # All workers must report equally often: rank 0's worker decides.
        news = None
        if first:
            running, step = script.returncode is None, newest_step(saves)
            # A checkpoint is saved before its epoch is evaluated.
            news = running, 0 if running and not goes_on(step, config["output_dir"]) else step
        running, step = broadcast_from_rank_zero(news)
        if step > reported:
            metrics = metrics_until(step, config["output_dir"]) if first else {}
            # The checkpoint is already in its place: nothing to copy.
            ray.train.report(
                metrics,
                Checkpoint.from_directory(saves),
                checkpoint_upload_mode=CheckpointUploadMode.NO_UPLOAD,
            )
            reported = step
    if script.wait():
        raise subprocess.CalledProcessError(script.returncode, config["command"])


# When a worker ends in any way, the kernel ends its rank (if Linux's setpriv is installed).
END_WITH_ME = ["setpriv", "--pdeathsig", "KILL"] if shutil.which("setpriv") else []


def newest_step(saves: Path) -> int:
    """The step of the newest complete checkpoint, step_00000044.pt or step_00000044/; else 0."""
    found = (re.fullmatch(r"step_(\d+)(\.pt)?", path.name) for path in saves.glob("step_*"))
    return max((int(match[1]) for match in found if match), default=0)


def metrics_until(step: int, output_dir: Path) -> dict[str, float]:
    """The last value of each number in metrics.jsonl, as of this step."""
    lines = logged(output_dir)
    return {name: value for line in lines if line["step"] <= step for name, value in line.items()}


def goes_on(step: int, output_dir: Path) -> bool:
    """Whether the script has logged something after the training step `step`."""
    lines = logged(output_dir)
    return bool(lines) and (lines[-1]["step"] > step or "loss" not in lines[-1])


def logged(output_dir: Path) -> list[dict]:
    path = output_dir / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


class TellFailures(ray.train.UserCallback):
    """Says which rank failed, and ends the job if another try would fail, too."""

    def after_exception(self, run_context, worker_exceptions: dict[int, Exception]) -> None:
        for rank, error in worker_exceptions.items():
            print(f"rank {rank}: {error}", flush=True)
            if isinstance(error, subprocess.CalledProcessError) and error.returncode == 2:
                raise error  # wrong arguments: after an error in a callback Ray does not retry


def tell(result: ray.train.Result) -> None:
    numbers = "   ".join(f"{name} {value:.4g}" for name, value in (result.metrics or {}).items())
    print(f"{result.path}: {numbers}")


def status_of(error: ray.train.TrainingFailedError) -> int:
    """The exit status: 2, as the script's, for wrong arguments, which the script has named."""
    cause = getattr(error, "controller_failure", None)
    return 2 if getattr(cause, "returncode", None) == 2 else 1


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        usage="train.py [--workers N] [--gpu] [--max-failures N] SCRIPT --output-dir DIR ...",
    )
    parser.add_argument("--workers", type=int, default=2, help="number of ranks on all hosts")
    parser.add_argument("--gpu", action="store_true", help="give each rank a GPU, not a CPU")
    parser.add_argument("--max-failures", type=int, default=3, help="give up after N failures")
    parser.add_argument("script", help="training script to run")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="arguments of the script")
    args = parser.parse_args()
    if not Path(args.script).is_file():
        parser.error(f"there is no script {args.script}")
    if args.workers < 1:
        parser.error(f"--workers {args.workers}: at least 1 is needed")
    of_script = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    of_script.add_argument("--output-dir", type=Path)
    known, args.arguments = of_script.parse_known_args(args.arguments)
    if known.output_dir is None:
        parser.error("the script needs --output-dir: restarted ranks continue from there")
    args.output_dir = known.output_dir.resolve()
    return args


if __name__ == "__main__":
    main()
