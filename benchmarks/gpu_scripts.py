"""Select the scripts that benchmarks/gpu.py runs on a GPU, and their flags."""

import importlib.util
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

RANKS = {  # the minimum number of ranks of a script, if it is not one
    "collectives/hangs.py": 2,
    "collectives/point_to_point.py": 2,
    "fsdp_basics/fsdp1_to_fsdp2.py": 2,
    "parallel_basics/pipeline_parallel.py": 2,
    "parallel_basics/tied_stages.py": 2,
    "transformer_basics/three_dimensions.py": 8,
}
STARTS_RANKS = "ddp_basics/spawn.py"  # itself, two where nothing is said
GPUS_PER_RANK = {"ddp_basics/ddp_with_model_parallel.py": 2}
ONLY_CUDA = "collectives/streams.py"  # has no --device
OTHERWISE = {
    "transformer_basics/generate.py": "needs a checkpoint: the step checkpoints runs it",
}
NOT_EVERYWHERE = {  # module -> the line of a script that cannot do without it
    "transformers": "\nfrom transformers import",
    "rouge_score": "from rouge_score.",
}
SHORT = {
    STARTS_RANKS: "--ranks 1",
    "ddp_basics/train.py": "--epochs 1",
    "fsdp_basics/train.py": "--epochs 1",
    "transformer_basics/train.py": "--steps 20 --sample 20 --eval-batches 1",
    "t5_finetuning/train.py": "--dim 32 --layers 1 --epochs 1 --batch-size 256 --eval-samples 4",
}


def scripts_with_device() -> list[str]:
    """Each script that has --device, and those that take a GPU by themselves."""
    names = [path.relative_to(ROOT).as_posix() for path in sorted(ROOT.glob("*/*.py"))]
    return list(filter(has_device, names))


def has_device(name: str) -> bool:
    script = ROOT / name
    if (
        '__name__ == "__main__"' not in script.read_text()
        or not script.with_name("runtime.py").exists()
    ):
        return False
    takes_a_gpu = "torch.accelerator" in script.read_text() and script.name == "minimal.py"
    return takes_a_gpu or name == ONLY_CUDA or '"--device"' in text_with_imports(name)


def text_with_imports(name: str) -> str:
    """The script's text, and that of the files of its directory that it imports."""
    script = ROOT / name
    texts, new = {}, {script}
    while new:
        texts |= {path: path.read_text() for path in new}
        found = re.findall(r"^(?:from|import) (\w+)", "\n".join(texts.values()), re.MULTILINE)
        new = {script.with_name(f"{module}.py") for module in found} - texts.keys()
        new = {path for path in new if path.exists()}
    return "\n".join(texts.values())


def why_not(name: str, device: str, ranks: int, gpus: int) -> str:
    """Why the script cannot run on `ranks` ranks that see `gpus` GPUs together; "" if it can."""
    if name == ONLY_CUDA and (ranks > 1 or device != "cuda"):
        return "needs one rank on a CUDA device"
    if ranks < RANKS.get(name, 1):
        return f"needs {RANKS[name]} ranks"
    if device == "cuda" and gpus < ranks * GPUS_PER_RANK.get(name, 1):
        return f"needs {GPUS_PER_RANK[name]} GPUs per rank"
    if name == STARTS_RANKS and ranks > 1:
        return "starts its ranks itself"
    for module, line in NOT_EVERYWHERE.items():
        if line in text_with_imports(name) and not has(module):
            return f"{module} is not installed"
    return OTHERWISE.get(name, "")


def flags_of(name: str, device: str) -> list[str]:
    takes_flag = not name.endswith("/minimal.py") and name != ONLY_CUDA
    return [*SHORT.get(name, "").split(), *(["--device", device] if takes_flag else [])]


def has(module: str) -> bool:
    return importlib.util.find_spec(module) is not None
