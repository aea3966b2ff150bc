r"""CUDA streams and memory: events, prefetch, forgotten waits, out of memory, a memory timeline.

    python collectives/streams.py                                       # on GPUs
    make .venv-emulated/installed                                       # or once: emulated GPUs,
    EMULATED_GPUS=1 .venv-emulated/bin/python collectives/streams.py    # then on emulated GPUs

A GPU executes kernels in streams, which are queues. Python only puts kernels into a queue. The
kernels of one stream run in order. Only events order the kernels of two streams: one stream records
an event, the other waits for it. NCCL and FSDP communicate in their own streams, so distributed
code can make each of these mistakes.

Look at

1. five programs, each with one line and without it. Without the line, memory is read, reused or
   overwritten too early, in two of them by the CPU: a race. The numbers are then wrong whenever
   what has to end first is late: on an H100, in each of the five (benchmarks/results/gpu.md).
   The emulated GPU knows the order that the program asks for. It raises an error at the first
   unordered access, and delays each non-blocking copy until the program waits for it.
2. prefetch. A side stream copies the next batch while the current stream computes.
3. out of memory. The allocation fails, and the program goes on.
4. the memory of one training step. Activations grow in forward and shrink in backward, while
   gradients grow; AdamW's first step adds two tensors per parameter, which stay.

The emulated GPU executes each kernel as it is queued. So it shows orders and bytes, but no overlap,
no speed, and no numbers that depend on timing.
"""

import textwrap

import torch
from arguments import ArgumentParser, at_least
from tables import print_table
from timelines import draw
from torch import nn
from torch.distributed.elastic.multiprocessing.errors import record

MIB = 2**20


@record
def main() -> None:
    args = parse_args()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    print("\n1. five programs, each with one line and without it")
    for name, (program, line) in PROGRAMS.items():
        print(f"\n{name}")
        for start, with_line in ((f"with {line}: ", True), ("without: ", False)):
            print_wrapped(f"  {start}{outcome(program, args.size, with_line)}")
    print("\n2. # computes, - copies the next batch, = both")
    print(*draw("prefetch", {"prefetch": prefetch(args.size, args.batches)}), sep="\n")
    print_wrapped(f"\n3. {out_of_memory()}")
    print("\n4. memory of one training step, MiB")
    timeline = memory_timeline(args.size)
    print_table(["after", "MiB", ""], timeline_rows(timeline))


def print_wrapped(text: str) -> None:
    print(textwrap.fill(text, 96, subsequent_indent="    ", replace_whitespace=False))


# ---- 1. one line


def outcome(program, size: int, with_line: bool) -> str:
    """Run a program that should return 2s: are they right, or the error of an emulated GPU."""
    torch.cuda.synchronize()
    try:
        numbers = program(size, with_line)
        torch.cuda.synchronize()
    except RuntimeError as error:
        return str(error).splitlines()[0]
    wrong = (numbers != 2).sum().item()  # nan is not 2 either
    return f"{wrong} of {numbers.numel()} numbers are wrong" if wrong else "right"


def wait_before(size: int, with_line: bool) -> torch.Tensor:
    """A side stream uses what the current stream computes."""
    side = torch.cuda.Stream()
    x = slow_twos(size)
    if with_line:
        side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        y = x.clone()
    torch.cuda.synchronize()
    return y


def wait_after(size: int, with_line: bool) -> torch.Tensor:
    """The current stream uses what a side stream computes: `work.wait()` is such a line."""
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        x = slow_twos(size)
    if with_line:
        torch.cuda.current_stream().wait_stream(side)
    return x.clone()


def record_stream(size: int, with_line: bool) -> torch.Tensor:
    """A side stream still reads a tensor when Python deletes it, and its memory is reused."""
    side = torch.cuda.Stream()
    x = torch.full((size, size), 2.0, device="cuda")
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        slow_twos(size)
        y = x.clone()
    if with_line:
        x.record_stream(side)  # the allocator waits for `side` before it reuses the memory
    del x
    torch.full((size, size), 7.0, device="cuda")  # takes the memory of x, if that is free
    torch.cuda.synchronize()
    return y


def read_copy(size: int, with_line: bool) -> torch.Tensor:
    """The CPU reads the result of a non-blocking copy."""
    copy = torch.zeros(size, size).pin_memory()
    copy.copy_(slow_twos(size), non_blocking=True)
    if with_line:
        torch.cuda.current_stream().synchronize()
    return copy.clone()


def refill_buffer(size: int, with_line: bool) -> torch.Tensor:
    """The CPU writes the next batch into pinned memory that is still being copied."""
    batch = torch.full((size, size), 2.0).pin_memory()
    slow_twos(size)
    on_gpu = batch.to("cuda", non_blocking=True)
    if with_line:
        torch.cuda.current_stream().synchronize()
    batch.fill_(7)
    return on_gpu


PROGRAMS = {  # name -> (program, the line that it runs with and without)
    "use on a side stream": (wait_before, "side.wait_stream(current)"),
    "use on this stream": (wait_after, "current.wait_stream(side)"),
    "delete while it is read": (record_stream, "x.record_stream(side)"),
    "read a copy": (read_copy, "synchronize()"),
    "refill a pinned buffer": (refill_buffer, "synchronize()"),
}


def slow_twos(size: int) -> torch.Tensor:
    """A matrix of zeros; then other work, which lets Python run ahead; then the zeros become 2."""
    x = torch.zeros(size, size, device="cuda")
    eye = torch.eye(size, device="cuda")
    for _ in range(20):
        eye = eye @ eye
    return x.add_(2)


# ---- 2. prefetch


def prefetch(size: int, batches: int) -> list[tuple]:
    """For each batch (begin, end of computation, begin, end of the next copy), in seconds."""
    side, current = torch.cuda.Stream(), torch.cuda.current_stream()
    host = torch.ones(size, size).pin_memory()
    weight = torch.eye(size, device="cuda")
    start, marks = mark(), []
    batch = host.to("cuda", non_blocking=True)
    for _ in range(batches):
        with torch.cuda.stream(side):
            begin_copy = mark()
            following = host.to("cuda", non_blocking=True)
            end_copy = mark()
        begin = mark()
        for _ in range(20):
            weight @ batch
        marks.append((begin, mark(), begin_copy, end_copy))
        current.wait_event(end_copy)  # before this stream uses the batch
        following.record_stream(current)  # allocated on `side`, used on `current`
        batch = following
    torch.cuda.synchronize()
    return [tuple(start.elapsed_time(m) / 1e3 for m in span) for span in marks]


def mark() -> torch.Event:
    """The time at which the current stream gets here."""
    event = torch.Event("cuda", enable_timing=True)
    event.record()
    return event


# ---- 3. out of memory


def out_of_memory() -> str:
    total = torch.cuda.get_device_properties().total_memory
    before = torch.cuda.memory_allocated()
    try:
        torch.empty(total + 1, dtype=torch.uint8, device="cuda")
    except torch.OutOfMemoryError as error:
        said = str(error).splitlines()[0]
    assert torch.cuda.memory_allocated() == before  # the failed allocation holds no memory
    return f"{said} Still allocated: {before / MIB:.2f} MiB"


# ---- 4. memory of a step


def memory_timeline(size: int, layers: int = 4) -> list[tuple[str, int]]:
    """(what has happened, bytes allocated then) in the first training step of an MLP.

    size: width of the layers and rows of the batch, so a weight, a batch of activations and a
    gradient have 4 size^2 bytes each.
    """
    moments, before = [], torch.cuda.memory_allocated()

    def note(what: str) -> None:
        moments.append((what, torch.cuda.memory_allocated() - before))

    model = nn.ModuleList(nn.Linear(size, size, bias=False) for _ in range(layers)).to("cuda")
    optimizer = torch.optim.AdamW(model.parameters())
    for i, layer in enumerate(model):
        layer.weight.register_post_accumulate_grad_hook(lambda _, i=i: note(f"backward {i}"))
    note("parameters")
    x = torch.ones(size, size, device="cuda")
    note("batch")
    for i, layer in enumerate(model):
        x = torch.tanh(layer(x))  # tanh saves its output, which the next layer saves as its input
        note(f"forward {i}")
    loss = x.sum()
    del x  # else it would live as long as the loss
    loss.backward()
    note("backward")
    optimizer.step()
    note("optimizer step")
    optimizer.zero_grad()
    note("zero_grad")
    return moments


def timeline_rows(timeline: list[tuple[str, int]], width: int = 40) -> list[list[str]]:
    most = max(nbytes for _, nbytes in timeline)
    return [
        [what, f"{nbytes / MIB:.2f}", "#" * round(width * nbytes / most)]
        for what, nbytes in timeline
    ]


def parse_args():
    parser = ArgumentParser(description="Streams, events and memory of a GPU.")
    add = parser.add_argument
    add("--size", type=at_least(16), default=1024, help="rows of the matrices (default: 1024)")
    add("--batches", type=at_least(1), default=5, help="batches to prefetch (default: 5)")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error(
            "streams need a GPU. Without one: make .venv-emulated/installed, then "
            "EMULATED_GPUS=1 .venv-emulated/bin/python collectives/streams.py"
        )
    return args


if __name__ == "__main__":
    main()
