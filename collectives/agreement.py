"""Compare device type, flags, code and versions of all ranks before they connect.

Without this check, a node that lost its GPU or runs old code causes a hang or a wrong result.
"""

import hashlib
import json
import platform
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from arguments import fail


def compare_ranks(
    store: dist.Store, rank: int, world_size: int, device: torch.device | None, problem: str
) -> None:
    """End the program, with one sentence on each node, if the ranks cannot work together.

    device: this rank's device, or None. problem: why this rank has no device, else "".
    """
    about = {"host": platform.node(), "problem": problem, "equal": what_must_be_equal(device)}
    about["gpu"] = id_of(device)
    store.set(f"about rank {rank}", json.dumps(about))
    if rank == 0:  # rank 0 compares all ranks; every rank reads the result
        everyone = [json.loads(store.get(f"about rank {r}")) for r in range(world_size)]
        store.set("problem of the ranks", find_problem(everyone))
    found = store.get("problem of the ranks").decode()
    if found:
        fail(found)


def what_must_be_equal(device: torch.device | None) -> dict[str, str]:
    folder = Path(__file__).resolve().parent
    code = hashlib.sha256()
    for path in sorted(folder.glob("*.py")):
        if path.is_file():  # an editor's lock file is a dangling link
            code.update(path.read_bytes())
    return {
        "device type": device.type if device else "",
        "flags": " ".join(sys.argv[1:]),
        f"sha256 of {folder.name}/*.py": code.hexdigest()[:12],
        "version of torch": torch.__version__,
        "version of Python": ".".join(platform.python_version_tuple()[:2]),
    }


def id_of(device: torch.device | None) -> str:
    """The UUID of this GPU; "" on a CPU, or if torch does not know it."""
    if device is None or device.type == "cpu":
        return ""
    properties = torch.get_device_module(device).get_device_properties(device)
    return str(getattr(properties, "uuid", ""))


def find_problem(everyone: list[dict]) -> str:
    """One sentence about the first rank that does not fit the job; "" if all ranks fit."""
    users = {}  # GPU -> the first rank that uses it
    for rank, about in enumerate(everyone):
        name = f"rank {rank} on {about['host']}"
        if about["problem"]:
            return f"{name} {about['problem']}"
        for what, value in about["equal"].items():
            expected = everyone[0]["equal"].get(what)
            if value != expected:
                return (
                    f"all ranks need the same {what}: {name} has '{value}', "
                    f"rank 0 on {everyone[0]['host']} has '{expected}'"
                )
        user = users.setdefault(about["gpu"], name)
        if about["gpu"] and user != name:
            return (
                f"{name} has the same GPU as {user}: start one rank per GPU, or pass --device cpu"
            )
    return ""
