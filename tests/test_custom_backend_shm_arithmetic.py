"""custom_backend/shm/reduce.cpp: half precision has vector instructions, and scalar results."""

import ctypes
import itertools
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from helpers import ROOT

SHM = ROOT / "custom_backend" / "shm"
COMPILER = os.environ.get("CXX", "g++")
CALL = """
#include "reduce.cpp"
extern "C" int level() {
  void (*widen)(const shm::Float16*, float*, size_t) = nullptr;
  const auto used = shm::blocks<shm::Float16>().widen;
#if SHM_LEVEL >= 4
  widen = shm::avx512::widen;
  if (used == widen) return 4;
#endif
#if SHM_LEVEL >= 3
  widen = shm::avx2::widen;
  if (used == widen) return 3;
#endif
  return 0;
}
extern "C" void call(int dtype, int op, const void* const* sources, int sources_count,
                     void* const* targets, int targets_count, size_t count, double factor) {
  shm::reduce(shm::Dtype(dtype), shm::Op(op), sources, sources_count, targets, targets_count, count,
              factor);
}
"""
DTYPES = {torch.float16: 15, torch.bfloat16: 16}  # enum Dtype of reduce.h
OPS = {"sum": 0, "average": 1, "product": 2, "min": 3, "max": 4, "premul_sum": 8}  # enum Op
LEVELS = (0, 3, 4)  # SHM_LEVEL of half.h: any processor, AVX2, AVX-512

pytestmark = [pytest.mark.release, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def libraries(tmp_path_factory) -> dict[int, Path]:
    """reduce.cpp, compiled for each level."""
    if platform.machine() != "x86_64" or shutil.which(COMPILER) is None:
        pytest.skip("needs a C++ compiler on x86-64")
    folder = tmp_path_factory.mktemp("arithmetic")
    (folder / "call.cpp").write_text(CALL)
    build = (ROOT / "custom_backend/shm/build.py").read_text()
    flags = re.search(r"^FLAGS = \[(.*)\]", build, re.M)[1].replace('"', "").split(", ")
    found = {}
    for level in LEVELS:
        found[level] = folder / f"{level}.so"
        command = [COMPILER, *flags, "-shared", "-fPIC", f"-DSHM_LEVEL={level}", "-I", SHM]
        command += [folder / "call.cpp", "-o", found[level]]
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=600)
    return found


def function(library: Path) -> Callable[..., torch.Tensor]:
    call = ctypes.CDLL(str(library)).call
    call.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_void_p, ctypes.c_int]
    call.argtypes += [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t, ctypes.c_double]

    def reduce(op: str, sources: list[torch.Tensor]) -> torch.Tensor:
        target = torch.zeros_like(sources[0])
        pointers = (ctypes.c_void_p * len(sources))(*(x.data_ptr() for x in sources))
        targets = (ctypes.c_void_p * 1)(target.data_ptr())
        dtype, count = DTYPES[target.dtype], target.numel()
        call(dtype, OPS[op], pointers, len(sources), targets, 1, count, 1 / 3)
        return target

    return reduce


def inputs(dtype: torch.dtype, count: int) -> list[torch.Tensor]:
    """All 65,536 numbers of the dtype, in several orders, and 5 more: an odd number."""
    patterns = torch.cat([torch.arange(2**16), torch.arange(5)]).to(torch.uint16).view(dtype)
    orders = [torch.randperm(2**16 + 5, generator=torch.manual_seed(seed)) for seed in range(count)]
    return [patterns, *(patterns[order] for order in orders)][:count]


def test_the_fastest_version_of_this_processor_runs(libraries):
    """All libraries lie in this process, as here in the other tests."""
    flags = re.search(r"^flags\s*: (.*)", Path("/proc/cpuinfo").read_text(), re.M)[1].split()
    has = {4: {"avx512f", "avx512bw", "avx512vl"}, 3: {"avx2", "f16c"}, 0: set()}
    for level in LEVELS:
        possible = [n for n in has if n <= level and has[n] <= set(flags)]
        assert ctypes.CDLL(str(libraries[level])).level() == possible[0]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("op", OPS)
def test_vectors_give_the_bits_of_scalars(libraries, op, dtype):
    plain, *fast = (function(libraries[level]) for level in LEVELS)
    for count, vectors in itertools.product((1, 2, 3, 7), fast):
        sources = inputs(dtype, count)
        expected, found = plain(op, sources), vectors(op, sources)
        # Of two NaNs an addition keeps one, and the compiler chooses which.
        assert torch.equal(expected.isnan(), found.isnan())
        numbers = ~expected.isnan()
        assert torch.equal(expected.view(torch.int16)[numbers], found.view(torch.int16)[numbers])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_sum_is_added_in_float_in_rank_order_and_rounded_once(libraries, dtype):
    sources = inputs(dtype, 3)
    expected = ((sources[0].float() + sources[1].float()) + sources[2].float()).to(dtype)
    for level in LEVELS:
        found = function(libraries[level])("sum", sources)
        torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


INSTRUCTIONS = {
    (3, "float16"): (r"vcvtph2ps .*%ymm", r"vcvtps2ph .*%ymm"),
    (3, "bfloat16"): (r"vpmovzxwd .*%ymm", r"vpaddd .*%ymm"),
    (4, "float16"): (r"vcvtph2ps .*%zmm", r"vcvtps2ph .*%zmm"),
    (4, "bfloat16"): (r"vpmovzxwd .*%[yz]mm", r"vpaddd .*%[yz]mm"),
}


@pytest.mark.parametrize(("level", "name"), INSTRUCTIONS)
def test_half_precision_has_vector_instructions(libraries, level, name):
    """In the functions of half.h that widen and narrow a block."""
    if shutil.which("objdump") is None:
        pytest.skip("needs objdump, of binutils")
    command = ["objdump", "--disassemble", "--demangle", "--no-show-raw-insn", libraries[level]]
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    kind = {"float16": "Float16", "bfloat16": "BFloat16"}[name]
    space = {3: "avx2", 4: "avx512"}[level]
    for what, mnemonic in zip(("widen", "narrow"), INSTRUCTIONS[level, name], strict=True):
        bodies = re.findall(rf"<shm::{space}::{what}\(.*\bshm::{kind}\b.*>:\n((?:.+\n)+)", text)
        assert len(bodies) == 1
        found = re.search(mnemonic, bodies[0])
        assert found, f"{what} has no {mnemonic}"
