"""Plans a training job: which mesh, how much memory, how many seconds, and what limits it.

    python planner/plan.py --model llama-3-8b --gpus 64 --gpu H100 --sequence 8192 --batch-tokens 4M
    python planner/plan.py --model llama-3-8b --gpus 64 --explain 1
    python planner/plan.py --model llama-3-8b --gpus 64 --explain dp=8x1,tp=8,micro=1,zero=1

Look at: the parts of memory and time of ten meshes, and what the last column says they wait for.
--explain derives each number of one mesh; --plot draws all of them.
"""

import argparse
import sys
from pathlib import Path
from typing import NoReturn

import command
import inputs
import report
from closed_pipe import quiet_if_closed
from derivation import explanation
from inputs import UserError
from search import Job, Plan, best, by_time, checkpointing, evaluate, meshes

MOST_GPUS = 100_000  # more than any training has used; the search grows with it
AXES = {"tp": "tp", "pp": "pp", "cp": "cp", "micro": "micro_batch", "zero": "zero_stage"}
AXES |= {"v": "virtual_stages", "checkpoint": "full_checkpointing"}
AXES |= {"selective": "selective_checkpointing"}


@quiet_if_closed()
def main():
    args = parse_args()
    try:
        run(args)
    except UserError as error:
        fail(str(error))


def run(args: argparse.Namespace) -> None:
    """Plan and print. Raises UserError."""
    cluster, stack_name, own = inputs.cluster(args.gpu)
    stack_name = args.stack or stack_name
    stack, known = inputs.stack(stack_name)
    if own and not args.stack:
        stack, known, stack_name = own, {"calibrated": True}, args.gpu
    batch = inputs.sequences(inputs.count(args.batch_tokens), args.sequence)
    model = inputs.model(args.model)
    if args.gpus > MOST_GPUS:
        raise UserError(f"--gpus {args.gpus} is above {MOST_GPUS:,}")
    inputs.links(cluster, args.gpus, args.gpu)
    if args.fp8 and not cluster.fp8:
        raise UserError(f"--fp8: {args.gpu} has no fp8 (fp8 = 1 in the file of a GPU that has it)")
    kernels = {"fp8": int(args.fp8), "flash": int(not args.no_flash)}
    job = Job(model, cluster, stack, args.gpus, args.sequence, batch, **kernels)
    plans = best(job)
    if args.explain:
        plans = [named(job, plans, args.explain)]
    pick = plans[0]
    print(
        f"{args.model} ({model.parameters / 1e9:.3g} B weights), {args.gpus} x {args.gpu}, "
        f"sequence {args.sequence}, {batch} sequences per step; constants: {stack_name}"
    )
    print()
    print("\n".join(explanation(job, pick) if args.explain else report.table(job, plans)))
    if not args.explain:
        print(f"\nMFU: {report.MFU}.")
    if (causal := report.causal_mfu(job, pick)) < 5 / 6 * report.mfu(job, pick):
        print(f"With the causal half of attention only, the MFU of the first mesh is {causal:.0%}.")
    if not pick.fits:
        print("\nNo mesh fits: these hold least." if not args.explain else "")
    for doubt in report.doubts_by_line(job, plans, stack_name, known, args.gpu):
        print(f"not validated for: {doubt}")
    if args.flags:
        print(f"\n{command.flags(job, pick)}")
    if args.plot:
        from drawing import draw  # matplotlib takes a second to import

        draw(job, plans, args.plot)
        print(f"\n{args.plot} shows the plans")
    if not (pick.fits or args.explain):
        raise SystemExit(1)  # as the message says: no mesh fits


def named(job: Job, plans: list[Plan], text: str) -> Plan:
    """The plan that --explain asks for: a line of the table, or a mesh such as dp=8x2,tp=4.

    An axis that the text leaves out has size 1; micro-batch, ZeRO stage and so on are the fastest.
    """
    if text.isdecimal() and len(text) < 9:
        if not 1 <= int(text) <= len(plans):
            raise UserError(f"--explain {text}: the table has the lines 1 to {len(plans)}")
        return plans[int(text) - 1]
    wanted = {"tp": 1, "pp": 1, "cp": 1}
    for item in text.split(","):
        key, _, value = item.partition("=")
        try:
            if key == "dp":
                replicate, _, shard = value.partition("x")
                wanted["dp_replicate"], wanted["dp_shard"] = int(replicate), int(shard or 1)
            else:
                wanted[AXES[key]] = int(value)
        except (KeyError, ValueError):
            keys = ", ".join(["dp", *AXES])
            raise UserError(f"--explain {item!r} is not KEY=NUMBER with one of: {keys}") from None
    every = meshes(job)
    if wanted.get("selective_checkpointing") and (0, 1) not in checkpointing(job):
        raise UserError(f"--explain {text}: with a flash kernel selective=1 saves nothing")
    if "dp_replicate" not in wanted:
        wanted |= {"dp_replicate": 1, "dp_shard": 1}
    sizes = ("dp_replicate", "dp_shard", "tp", "pp", "cp")
    if wanted["pp"] > 1 and wanted["dp_shard"] > 1:
        raise UserError(
            f"--explain {text}: FSDP in a pipeline keeps weights gathered and gradients whole "
            "during a step, as ZeRO-1 does: leave out the x of dp, and add zero=1"
        )
    product = 1
    for size in sizes:
        product *= wanted[size]
    if product != job.gpus:
        close = min(every, key=lambda m: sum(getattr(m, k) != v for k, v in wanted.items()))
        raise UserError(
            f"--explain {text} is a mesh of {product} GPUs, not of {job.gpus}: "
            f"the nearest that works is {report.name(close)}"
        )
    found = [m for m in every if all(getattr(m, key) == value for key, value in wanted.items())]
    if not found:
        close = min(every, key=lambda m: sum(getattr(m, k) != v for k, v in wanted.items()))
        raise UserError(
            f"--explain {text}: no such mesh splits {job.batch} sequences, {job.model.heads} heads "
            f"({job.model.kv_heads} of keys) and {job.model.layers} layers: the nearest that works "
            f"is {report.name(close)},micro={close.micro_batch},zero={close.zero_stage}"
        )
    considered = evaluate(job, found)
    return min(considered, key=lambda plan: (not plan.fits, by_time(plan)))


def fail(message: str) -> NoReturn:
    print(f"plan.py: error: {message}", file=sys.stderr)
    raise SystemExit(2)


class ArgumentParser(argparse.ArgumentParser):
    """argparse whose errors are one sentence."""

    def error(self, message: str) -> NoReturn:
        fail(message.removeprefix("argument "))


def whole(text: str) -> int:
    """An argument type: a whole number above 0."""
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return value


def parse_args() -> argparse.Namespace:
    parser = ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--model", required=True, help="preset of presets.toml, or a Hugging Face config.json")
    add("--gpus", type=whole, required=True, help="number of GPUs")
    add("--gpu", default="H100", help="preset, or a TOML file as in presets.toml (default: H100)")
    add("--sequence", type=whole, default=8192, help="tokens per sequence (default: 8192)")
    add("--batch-tokens", default="4M", help="tokens per step; M is 1,048,576 (default: 4M)")
    add("--stack", help="constants of this framework in stacks.toml (default: the GPU's)")
    add("--fp8", action="store_true", help="compute the layers' matrix products in fp8")
    add("--no-flash", action="store_true", help="compute attention without a flash kernel")
    add(
        "--explain",
        metavar="N|MESH",
        help="derive each number of line N, or of a mesh such as dp=8x8,tp=2 (default: none)",
    )
    add("--flags", action="store_true", help="print train.py's command line for the pick")
    add(
        "--plot",
        type=Path,
        help="draw memory, time and bytes of the plans into this PNG (default: none)",
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()
