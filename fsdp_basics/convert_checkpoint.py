"""Convert a sharded checkpoint to one file for torch.load or safetensors, and back; no torchrun.

    torchrun --standalone --nproc_per_node=2 fsdp_basics/train.py --output-dir runs/vit
    python fsdp_basics/convert_checkpoint.py runs/vit/checkpoints model.safetensors
    python fsdp_basics/convert_checkpoint.py runs/vit/checkpoints model.pt
    python fsdp_basics/convert_checkpoint.py model.safetensors sharded     # and back

It converts only the model, a third of a checkpoint of train.py; the rest is optimizer state. Look
at the last lines: they compare the tensors in the result with those of the source. The way back
writes one unsharded tensor per name. Any number of ranks can load it: dcp.load reads one after
another, each whole, and keeps the rows that the rank needs.
"""

import warnings
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from arguments import ArgumentParser, UserError, fail
from safetensors.torch import load_file, save_file
from saves import newest, problem_of

# dcp warns that there is only one process, which is what we want.
warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninit")


def main() -> None:
    args = parse_args()
    if not args.target.absolute().parent.is_dir():
        fail(f"there is no folder {args.target.parent}")
    try:
        model = read_model(args.source)
        write_model(args.target, model)
        again = read_model(args.target)
    except UserError as error:
        fail(str(error))
    same = model.keys() == again.keys() and all(torch.equal(model[k], again[k]) for k in model)
    for name, tensor in model.items():
        print(f"{name:40} {tuple(tensor.shape)!s:14} {str(tensor.dtype).removeprefix('torch.')}")
    count = sum(tensor.numel() for tensor in model.values())
    print(f"{len(model)} tensors, {count:,} numbers: {args.source} -> {args.target}")
    print(f"read again, equal bit for bit: {same}")


def read_model(source: Path) -> dict[str, torch.Tensor]:
    """The full model in `source`, by name: a sharded checkpoint (folder), *.safetensors or *.pt.

    Raises `UserError` if it cannot be read.
    """
    try:
        if source.suffix == ".safetensors":
            return load_file(source)
        if source.suffix == ".pt":
            return model_in(torch.load(source, map_location="cpu", weights_only=True))
        found = newest(source)  # in a folder of saves; otherwise `source` is a sharded model
        folder = found[0] if found else source
        if (folder / "run.pt").exists() and (problem := problem_of(folder)):
            raise UserError(problem)
        # The metadata has the name and shape of every tensor: allocate memory for the model only.
        # no_dist: this one process reads all shards.
        listed = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
        state = {
            name: torch.empty(entry.size, dtype=entry.properties.dtype)
            for name, entry in listed.items()
            if name.startswith("model.")
        }
        dcp.load(state, checkpoint_id=folder, no_dist=True)
        return {name.removeprefix("model."): tensor for name, tensor in state.items()}
    except UserError:
        raise
    except Exception as error:  # OS, zip, pickle, safetensors, dcp: all mean that it is not a model
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(f"cannot read a model from {source}: {reason}") from None


def model_in(state) -> dict[str, torch.Tensor]:
    """`state`, or its "model" if `state` is a checkpoint of ddp_basics/train.py."""
    if isinstance(state, dict) and isinstance(state.get("model"), dict):
        state = state["model"]
    if not isinstance(state, dict) or not all(isinstance(t, torch.Tensor) for t in state.values()):
        raise ValueError("it holds no state dict of tensors: save model.state_dict()")
    return state


def write_model(target: Path, model: dict[str, torch.Tensor]) -> None:
    """Write `model` to `target`, in the format of its suffix: .safetensors, .pt, none (sharded).

    Raises `UserError` if `target` exists: nothing is overwritten.
    """
    if target.exists():
        raise UserError(f"{target} exists: name another target, or move it away")
    if target.suffix == ".safetensors":
        # It refuses tensors with gaps, and two that share memory, as tied weights do.
        dense = torch.contiguous_format
        save_file({name: t.clone(memory_format=dense) for name, t in model.items()}, target)
    elif target.suffix == ".pt":
        torch.save(model, target)
    else:
        dcp.save({"model": model}, checkpoint_id=target, no_dist=True)


def parse_args():
    parser = ArgumentParser(description="Convert a sharded checkpoint to one file, or back.")
    parser.add_argument("source", type=Path, help="sharded checkpoint (folder), .pt, .safetensors")
    parser.add_argument("target", type=Path, help="name.pt, name.safetensors, or a new folder")
    return parser.parse_args()


if __name__ == "__main__":
    main()
