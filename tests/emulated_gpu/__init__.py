"""GPUs for a machine without any: a CPU-only PyTorch with CUDA devices in the CPU's memory.

    make .venv-emulated/installed
    EMULATED_GPUS=2 .venv-emulated/bin/torchrun --standalone --nproc_per_node=2 ddp_basics/train.py

Scripts run unchanged, on cuda:0, cuda:1, ... with the backend nccl. The kernels are the CPU's and
the messages are Gloo's. The rules are the GPU's: tensors on one device, NCCL only for CUDA tensors
of this rank's GPU, one rank per GPU, and streams that are ordered by nothing but events. A program
that breaks a rule gets an error, or NaN where it reads a copy too early.

**Streams.** Kernels run at once, in the order of the program; a vector clock per stream finds each
pair of them that a GPU could also run in another order with another result, and raises (order.h
says what it sees and what it does not). One run so says more than many runs that shuffle the
streams: those find a forgotten wait only where an order that they draw changes a number.
With EMULATED_GPU_RACES=show there is no error: the forgotten wait gives a wrong number.

EMULATED_GPUS          how many GPUs this machine has
CUDA_VISIBLE_DEVICES   which of them a process sees, as with real ones: 0,3 (default: all)
EMULATED_GPU_BYTES     memory of each (default: 80 GiB); more raises torch.OutOfMemoryError
EMULATED_GPU_RACES     show: no error where two streams are not ordered. What a kernel, a copy or a
                       message writes then arrives as late as it may: a reader that does not wait
                       gets what was there before, or NaN. Only such reads show. Slower.

The environment imports this package as Python starts (build.py writes the line that does so) where
EMULATED_GPUS is set.
"""

from emulated_gpu import cuda

__all__ = ["cuda"]
