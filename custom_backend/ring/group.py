"""A process group in Python: the methods that PyTorch calls, built on collectives.py.

    dist.Backend.register_backend("ring", new_ring_group, extended_api=True, devices=["cpu"])

PyTorch calls one method per operation, with lists of tensors and an object of options, and gets a
Work to wait for. Each collective goes into a queue, and one thread per group runs the queue in the
order of the calls, which is the same on all ranks. send and recv do not go through the queue:
rank 0 may call all_reduce(async_op=True) and then send, while rank 1 calls recv and then
all_reduce. In a common queue these two ranks would wait for each other forever.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from queue import SimpleQueue

import torch
import torch.distributed as dist

from ring import collectives as ring
from ring.inbox import ANY
from ring.running import check_size, run_all, run_one
from ring.wire import LABEL_BYTES, TAGGED, Wire, start_thread
from ring.work import Work

# Combine the tensor of another rank into mine. (AVG adds, and divides at the end.)
ADD = {
    "SUM": torch.Tensor.add_,
    "AVG": torch.Tensor.add_,
    "PRODUCT": torch.Tensor.mul_,
    "MIN": lambda mine, theirs: torch.minimum(mine, theirs, out=mine),
    "MAX": lambda mine, theirs: torch.maximum(mine, theirs, out=mine),
    "BAND": torch.Tensor.bitwise_and_,
    "BOR": torch.Tensor.bitwise_or_,
    "BXOR": torch.Tensor.bitwise_xor_,
}


def new_ring_group(opts, backend_options=None, wire=Wire) -> "RingGroup":
    """For register_backend. opts: the store, this rank, the size, the timeout."""
    names = list(opts.global_ranks_in_group) or list(range(opts.group_size))
    # Groups created one after another may share a store, so each rank counts its groups.
    life = opts.store.add(f"lives of {opts.group_rank}", 1)
    store = dist.PrefixStore(f"life {life}", opts.store)
    return RingGroup(wire(store, opts.group_rank, opts.group_size, opts.timeout, names))


class RingGroup(dist.ProcessGroup):
    def __init__(self, wire: Wire):
        super().__init__(wire.rank, wire.size)
        self.wire = wire
        self.seconds = wire.timeout
        self.collectives = 0
        self.closed = False
        self.queue = SimpleQueue()
        self.thread = start_thread("wire collectives", run_all, self.queue)

    def start(self, operation: str, detail: str, tensors: list, run: Callable, opts) -> Work:
        """Put a collective into the queue. tensors: those that will hold its result."""
        if self.closed:
            raise dist.DistBackendError(f"{operation}: this rank has left the group")
        dtype = str(tensors[0].dtype).removeprefix("torch.") if tensors else ""
        label = " ".join(word for word in (operation, dtype, detail) if word)[:LABEL_BYTES]
        seconds = self.seconds
        if opts is not None and opts.timeout > timedelta(0):  # unset: -1 ms
            seconds = opts.timeout.total_seconds()
        number = self.collectives
        self.collectives += 1
        work = Work(tensors, f"{label} (collective number {number} of this group)")
        self.queue.put(partial(run_one, self.wire, work, number, label, seconds, run))
        return work

    def allreduce(self, tensors, opts=None):
        op, add = reduction(opts, tensors[0])

        def run(link):
            for tensor in tensors:
                with flat([tensor]) as (x,):
                    ring.all_reduce(link, x, add)
                    link.finish()  # else a part that is not sent yet would be divided twice
                    divide(x, op, link.size)

        return self.start("all_reduce", op, tensors, run, opts)

    allreduce_coalesced = allreduce

    def broadcast(self, tensors, opts):
        root = opts.rootRank

        def run(link):
            for tensor in tensors:
                with flat([tensor]) as (x,):
                    ring.broadcast(link, x, root)

        return self.start("broadcast", f"from {root}", tensors, run, opts)

    def reduce(self, tensors, opts):
        root = opts.rootRank
        op, add = reduction(opts, tensors[0])

        def run(link):
            x = copy_of(tensors[0])  # partial sums must not reach the caller's tensor
            ring.reduce(link, x, root, add)
            if link.rank == root:
                divide(x, op, link.size)
                tensors[0].detach().copy_(x.view_as(tensors[0]))

        return self.start("reduce", f"{op} to {root}", tensors, run, opts)

    def allgather(self, outputs, inputs, opts=None):
        def run(link):
            for parts, own in zip(outputs, inputs, strict=True):
                with flat(parts) as flats:
                    flats[link.rank].copy_(own.detach().reshape(-1))
                    ring.all_gather(link, flats)

        results = [tensor for parts in outputs for tensor in parts]
        return self.start("all_gather", "", results, run, opts)

    def all_gather_single(self, output, input, opts=None):
        return self.allgather([self.parts(output)], [input], opts)

    def all_gather_single_coalesced(self, outputs, inputs, opts=None):
        return self.allgather([self.parts(output) for output in outputs], inputs, opts)

    def reduce_scatter(self, outputs, inputs, opts=None):
        op, add = reduction(opts, outputs[0])

        def run(link):
            for output, parts in zip(outputs, inputs, strict=True):
                flats = [copy_of(part) for part in parts]  # the inputs of the caller do not change
                ring.reduce_scatter(link, flats, add)
                divide(flats[link.rank], op, link.size)
                output.detach().copy_(flats[link.rank].view_as(output))

        return self.start("reduce_scatter", op, outputs, run, opts)

    def reduce_scatter_single(self, output, input, opts=None):
        return self.reduce_scatter([output], [self.parts(input)], opts)

    def reduce_scatter_single_coalesced(self, outputs, inputs, opts=None):
        return self.reduce_scatter(outputs, [self.parts(input) for input in inputs], opts)

    def gather(self, outputs, inputs, opts):
        root = opts.rootRank
        own, parts = inputs[0], outputs[0] if outputs else []

        def run(link):
            with flat(parts) as flats:
                ring.gather(link, flats, line(own), root)

        return self.start("gather", f"to {root}", parts or inputs, run, opts)

    def scatter(self, outputs, inputs, opts):
        root = opts.rootRank
        parts = inputs[0] if inputs else []

        def run(link):
            with flat(outputs) as (x,):
                ring.scatter(link, x, [line(part) for part in parts], root)

        return self.start("scatter", f"from {root}", outputs, run, opts)

    def alltoall(self, outputs, inputs, opts=None):
        def run(link):
            with flat(outputs) as flats:
                ring.all_to_all(link, flats, [line(part) for part in inputs])

        return self.start("all_to_all", "", outputs, run, opts)

    def all_to_all_single(self, output, input, output_sizes, input_sizes, opts=None):
        outputs, inputs = self.rows(output, output_sizes), self.rows(input, input_sizes)
        return self.alltoall(outputs, inputs, opts)

    def barrier(self, opts=None):
        return self.start("barrier", "", [], ring.barrier, opts)

    # Point-to-point. A send is done when its last byte is sent, a receive when it has arrived.

    def send(self, tensors, to, tag):
        x = tensors[0].detach().contiguous()
        work = Work(tensors, f"send to rank {self.wire.names[to]}, tag {tag}", self.seconds)
        work.follow(self.wire.send(to, TAGGED, tag, x, str(x.dtype)))
        return work

    def recv(self, tensors, source, tag):
        x = tensors[0].detach()
        who = "any rank" if source is ANY else f"rank {self.wire.names[source]}"
        work = Work(tensors, f"receive from {who}, tag {tag}", self.seconds)

        def take(message):
            name = self.wire.names[message.source]
            if message.label != str(x.dtype):
                raise ValueError(f"rank {name} has sent {message.label}, expected was {x.dtype}")
            check_size(message, x, self.wire)
            work.source = message.source
            with torch.inference_mode():
                x.copy_(message.data.view(x.dtype).view(x.shape))

        work.follow(self.wire.expect(source, TAGGED, tag), take)
        return work

    def recv_anysource(self, tensors, tag):
        return self.recv(tensors, ANY, tag)

    # The rest.

    def parts(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Split along the first dimension: one part per rank."""
        tensor = tensor.detach()
        if tensor.is_contiguous():
            tensor = tensor.view(-1)  # then only the number of elements matters
        if len(tensor) % self.size():
            raise ValueError(f"{len(tensor)} elements or rows for {self.size()} ranks")
        return list(tensor.tensor_split(self.size()))

    def rows(self, tensor: torch.Tensor, sizes: list[int]) -> list[torch.Tensor]:
        """Split into whole rows: `sizes` of them for each rank, or equal numbers."""
        if not sizes and len(tensor) % self.size():
            raise ValueError(f"{len(tensor)} rows for {self.size()} ranks")
        return list(tensor.split(sizes or [len(tensor) // self.size()] * self.size()))

    def set_timeout(self, timeout: timedelta) -> None:
        self.seconds = timeout.total_seconds()

    def shutdown(self) -> None:
        self.closed = True
        self.queue.put(None)
        self.thread.join(self.seconds)  # finishes all collectives that were called
        self.wire.close()

    def abort(self) -> None:
        self.closed = True
        self.queue.put(None)
        self.wire.cut()

    def getBackendName(self) -> str:
        return self.wire.backend

    # PyTorch stores the name of a group in its backends, and this group has none.

    def setGroupName(self, name: str) -> None:
        self.name_of_group = name

    def getGroupName(self) -> str:
        return self.name_of_group

    def setGroupDesc(self, text: str) -> None:
        self.description = text

    def getGroupDesc(self) -> str:
        return self.description

    def _get_backend(self, device) -> "RingGroup":
        """batch_isend_irecv and FSDP2 ask for the backend of a device: the group serves all."""
        return self

    # The names that torch 2.11 to 2.13 call.
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single


def reduction(opts, tensor: torch.Tensor) -> tuple[str, Callable]:
    """The name of the ReduceOp, and the function that combines a received part."""
    op = dist.ReduceOp.SUM if opts is None else opts.reduceOp
    name = next((name for name in ADD if op == getattr(dist.ReduceOp, name)), None)
    if name is None:
        raise ValueError(f"the ring knows {', '.join(ADD)}, not {op}")
    if name == "AVG" and not (tensor.is_floating_point() or tensor.is_complex()):
        raise ValueError(f"AVG of {tensor.dtype} would have to be rounded: take SUM")
    return name, ADD[name]


def divide(x: torch.Tensor, op: str, size: int) -> None:
    if op == "AVG":
        x.div_(size)


@contextmanager
def flat(tensors: list[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """1-D views of the tensors; a tensor with gaps is copied, and written back at the end."""
    flats = [line(tensor) for tensor in tensors]
    yield flats
    for tensor, x in zip(tensors, flats, strict=True):
        if x.data_ptr() != tensor.data_ptr():
            tensor.detach().copy_(x.view_as(tensor))


def line(tensor: torch.Tensor) -> torch.Tensor:
    """The elements in one piece of memory, 1-D: a view of the tensor, or a copy if it has gaps."""
    return tensor.detach().contiguous().view(-1)  # reshape(-1) leaves the gaps of x[::2]


def copy_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().reshape(-1).clone()
