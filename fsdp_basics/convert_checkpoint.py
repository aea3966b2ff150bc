"""Turn a sharded checkpoint into one file for torch.load or safetensors, and back. No ranks needed.

    python fsdp_basics/convert_checkpoint.py runs/vit/checkpoints model.safetensors
    python fsdp_basics/convert_checkpoint.py runs/vit/checkpoints model.pt
    python fsdp_basics/convert_checkpoint.py model.safetensors sharded     # and back

Only the model is converted: of a checkpoint that train.py has written, a third; the rest is the
optimizer's. Look at the last lines: the tensors in the result, compared with those of the source.
What is written back is one tensor a name, without shards of its own: any number of ranks can load
it (dcp.load reads from a file just the rows that a rank asks for).
"""

import warnings
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from arguments import ArgumentParser, UserError, fail
from checkpoint import newest
from safetensors.torch import load_file, save_file

# dcp asks whether one process is meant. It is.
warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninit")


def main() -> None:
    args = parse_args()
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
    print(f"{len(model)} tensors, {count:,} parameters: {args.source} -> {args.target}")
    print(f"read again, equal bit for bit: {same}")


def read_model(source: Path) -> dict[str, torch.Tensor]:
    """The whole model in `source`, by name: a sharded checkpoint (folder), *.safetensors or *.pt.

    Raises `UserError` if it cannot be read.
    """
    try:
        if source.suffix == ".safetensors":
            return load_file(source)
        if source.suffix == ".pt":
            return torch.load(source, map_location="cpu", weights_only=True)
        found = newest(source)  # of a folder of saves; else `source` is a sharded model itself
        folder = found[0] if found else source
        # The metadata name every tensor with its shape, so that room can be made for the model
        # alone. no_dist: this one process reads all the shards.
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


def write_model(target: Path, model: dict[str, torch.Tensor]) -> None:
    """Write `model` to `target`; its suffix says how: .safetensors, .pt, none for a sharded one.

    Raises `UserError` if `target` exists: nothing is overwritten.
    """
    if target.exists():
        raise UserError(f"{target} exists: name another target, or move it away")
    if target.suffix == ".safetensors":
        save_file({name: tensor.contiguous() for name, tensor in model.items()}, target)
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
