"""torch.cuda.* and torch.distributed's NCCL, for the device in C++."""

import os
import types
from datetime import timedelta

from emulated_gpu import build

device = build.load()  # before torch, which looks for CUDA as it is imported

import torch
import torch.distributed as dist
from torch import cuda
from torch.distributed import distributed_c10d

started = []  # True once torch.cuda is initialized


def index(which=None) -> int:
    """Of a device, given as torch.cuda's functions take it; None: the current one."""
    if which is None:
        return device.current_device()
    if isinstance(which, int):
        return which if which >= 0 else device.current_device()
    which = torch.device(which)
    if which.type != "cuda":
        raise ValueError(f"Expected a cuda device, but got: {which}")
    return device.current_device() if which.index is None else which.index


def start() -> None:
    if started:
        return
    started.append(True)
    cuda.default_generators = tuple(map(device.default_generator, range(device_count())))
    for (
        call,
        _,
    ) in cuda._queued_calls:  # such as seeds; the two excluded here look at the real driver
        if call.__name__ not in ("_check_capability", "_check_cubins"):
            call()


def device_count() -> int:
    return len(device.visible_gpus())


def current_device() -> int:
    start()
    return device.current_device()


def set_device(which) -> None:
    start()
    device.set_device(index(which))


def exchange_device(new: int) -> int:
    before = current_device()
    if new >= 0:
        device.set_device(new)
    return before


class Stream(torch.Stream):
    def __new__(cls, device=None, priority=0, **known):
        start()
        if known:  # stream_id, device_index, device_type
            return super().__new__(cls, priority=priority, **known)
        return super().__new__(cls, torch.device("cuda", index(device)), priority=priority)

    @property
    def cuda_stream(self) -> int:
        return self.stream_id


class Event(torch.Event):
    def __new__(cls, enable_timing=False, blocking=False, interprocess=False, external=False):
        return super().__new__(cls, "cuda", enable_timing=enable_timing)


class StreamContext:
    def __init__(self, stream: torch.Stream | None):
        self.stream = stream

    def __enter__(self):
        if self.stream is not None:
            self.before = current_stream(self.stream.device)
            torch.accelerator.set_stream(self.stream)

    def __exit__(self, *_):
        if self.stream is not None:
            torch.accelerator.set_stream(self.before)


def stream_of(stream: torch.Stream) -> Stream:
    return Stream(stream_id=stream.stream_id, device_index=stream.device_index, device_type=1)


def current_stream(which=None) -> Stream:
    return stream_of(torch.accelerator.current_stream(torch.device("cuda", index(which))))


def default_stream(which=None) -> Stream:
    return Stream(stream_id=0, device_index=index(which), device_type=1)


def get_device_properties(which=None) -> types.SimpleNamespace:
    gpu = device.visible_gpus()[index(which)]
    properties = types.SimpleNamespace(name="Emulated GPU", major=9, minor=0)
    properties.total_memory = device.total_memory()
    properties.multi_processor_count = 132
    properties.uuid = f"{node()}-{gpu}"
    return properties


def node() -> str:
    """All nodes of a test are this machine, but each has GPUs of its own."""
    return os.environ.get("GROUP_RANK", "0")


def connect(store, rank: int, size: int, options) -> dist.Backend:
    """Gloo's backend for a communicator of NCCL, after NCCL's check that each rank has its GPU."""
    mine = get_device_properties().uuid
    store.set(f"GPU of rank {rank}", mine)
    for other in range(size):
        if other != rank and store.get(f"GPU of rank {other}").decode() == mine:
            raise dist.DistBackendError(
                f"NCCL error: invalid usage. Duplicate GPU detected : rank {rank} and rank {other} "
                f"both on CUDA device {mine}"
            )
    gloo = dist.ProcessGroupGloo(dist.PrefixStore("gloo", store), rank, size, options._timeout)
    gloo.options.global_ranks_in_group = [*range(size)]  # to be split
    return gloo


def resize_storage(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
    if storage.device.type != "cuda":
        return resize_of_torch(storage, size)
    device.resize_storage(storage, size)
    return storage


resize_of_torch = torch._C.StorageBase.resize_


def storage_to(storage: torch.UntypedStorage, device: torch.device, non_blocking: bool = False):
    """What torch.load does with a storage that was saved on a GPU."""
    if device.type != "cuda" or storage.device == device:
        return to_of_torch(storage, device, non_blocking)
    made = torch.empty(storage.nbytes(), dtype=torch.uint8, device=device).untyped_storage()
    return made.copy_(storage, non_blocking)


to_of_torch = torch.storage._to
memory = torch.accelerator.memory
FUNCTIONS = {
    "_exchange_device": exchange_device,
    "_is_compiled": lambda: True,
    "_lazy_init": start,
    "_maybe_exchange_device": exchange_device,
    "Event": Event,
    "Stream": Stream,
    "StreamContext": StreamContext,
    "current_device": current_device,
    "current_stream": current_stream,
    "default_stream": default_stream,
    "device_count": device_count,
    "empty_cache": memory.empty_cache,
    "get_device_capability": lambda which=None: (9, 0),
    "get_device_name": lambda which=None: get_device_properties(which).name,
    "get_device_properties": get_device_properties,
    "init": start,
    "is_available": lambda: device_count() > 0,
    "is_bf16_supported": lambda including_emulation=True: True,
    "is_current_stream_capturing": lambda: False,
    "is_initialized": lambda: bool(started),
    "max_memory_allocated": lambda which=None: memory.max_memory_allocated(index(which)),
    "max_memory_reserved": lambda which=None: memory.max_memory_reserved(index(which)),
    "mem_get_info": lambda which=None: memory.get_memory_info(index(which)),
    "memory_allocated": lambda which=None: memory.memory_allocated(index(which)),
    "memory_reserved": lambda which=None: memory.memory_reserved(index(which)),
    "memory_stats": lambda which=None: memory.memory_stats(index(which)),
    "reset_peak_memory_stats": lambda which=None: memory.reset_peak_memory_stats(index(which)),
    "set_device": set_device,
    "set_stream": torch.accelerator.set_stream,
    "stream": StreamContext,
    "synchronize": lambda which=None: device.synchronize(index(which)),
}


def replace() -> None:
    """Let torch.cuda and torch.distributed use the functions above."""
    for name, function in FUNCTIONS.items():
        for module in (cuda, cuda.random, cuda.memory, cuda.streams):
            if module is cuda or hasattr(module, name):
                setattr(module, name, function)
    cuda.nccl.version = lambda: (2, 28, 9)
    torch._C._cuda_isCurrentStreamCapturing = lambda: False
    torch._C._cuda_set_sync_debug_mode = device.set_sync_debug_mode
    torch._C._cuda_get_sync_debug_mode = device.get_sync_debug_mode
    torch._C._cuda_getCurrentRawStream = lambda device: current_stream(device).stream_id
    torch.UntypedStorage.resize_ = resize_storage
    torch.storage._to = storage_to
    device.ProcessGroupNCCL.Options = device.NCCLOptions
    for module in (dist, distributed_c10d):
        module.ProcessGroupNCCL = device.ProcessGroupNCCL
        module.is_nccl_available = lambda: True
    distributed_c10d._NCCL_AVAILABLE = True
    distributed_c10d.default_pg_nccl_timeout = timedelta(minutes=10)


replace()
