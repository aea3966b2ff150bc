"""Sets the constants of a stack on published runs: which rows set which, and the least squares."""

import dataclasses

import memory
import numpy as np
import step_time
from published import measured, stacked
from stacks import Stack

SCALE = 0.1  # log ratios beyond it count less and less: Cauchy's loss
# What is known of a constant before any row: its middle, and the width of its logarithm.
PRIOR = {
    "gemm_efficiency": (0.65, 0.35),
    "memory_passes": (9, 0.5),
    "attention_cost": (2, 1),
    "launch_s": (2.5e-3, 1),
    "fixed_s": (20e-3, 1.5),
    "hop_s": (15e-6, 1.2),
    "fp8_speed": (1.6, 0.25),
    "tp_overlap": (0.2, 1),
    "pipelined_launch_s": (2e-3, 1),
    "activation_factor": (1, 0.4),
    "base_gib": (1, 1.5),
}
WEIGHT = 0.5  # of the prior: small sets of rows stay near it, large ones do not feel it
PRODUCTS = ("gemm_efficiency", "memory_passes")
FP8 = (*PRODUCTS, "fp8_speed")
ATTENTION = (*PRODUCTS, "attention_cost")
FSDP = {"gradient_bytes": 2, "resident_bytes": 8, "optimizer_bytes": 8}
PREFETCHED = FSDP | {"dp_overlap": 1}
TITAN = PREFETCHED | {"gradient_bytes": 4, "logit_bytes": 15, "selective_bytes": 0.45}
MEGATRON = {"tp_overlap": 0.7, "dp_overlap": 0.8, "activation_factor": 0.85}
CUDA_GRAPHS = {"launch_s": 0, "fixed_s": 0}


@dataclasses.dataclass(frozen=True)
class Fit:
    """Which rows set which constants of a stack, and what is known of its software."""

    families: tuple[str, ...]
    software: tuple[str, ...]
    gpus: tuple[str, ...]
    time: tuple[str, ...]
    known: dict
    memory: tuple[str, ...] = ()


FITS = {
    "nanotron-h100": Fit(
        ("playbook",),
        ("nanotron",),
        ("H100",),
        (*PRODUCTS, "launch_s", "fixed_s", "tp_overlap", "pipelined_launch_s"),
        {
            "hop_s": 0,
            "balanced": 1,
            "resident_bytes": 8,
            "gathered_bytes": 4,
            "logit_traffic_bytes": 40,
        },
        ("activation_factor", "base_gib"),
    ),
    "megatron-deepspeed-a100": Fit(
        ("vtrain_single", "vtrain_multi"),
        ("megatron-deepspeed",),
        ("A100",),
        (*PRODUCTS, "launch_s", "fixed_s", "hop_s"),
        {},
    ),
    "bloom-a100": Fit(
        ("bloom",),
        ("megatron-deepspeed-bloom",),
        ("A100",),
        (*PRODUCTS, "hop_s"),
        {"balanced": 1},
        ("activation_factor", "base_gib"),
    ),
    "mt-nlg-a100": Fit(("mtnlg",), (), ("A100-40GB",), ("gemm_efficiency",), {}),
    "megatron-a100": Fit(
        ("ptdp2021", "korthikanti"),
        ("megatron-lm",),
        ("A100", "A100-40GB"),
        PRODUCTS,
        {},
    ),
    "megatron-h100": Fit(("megatronH100",), ("megatron-lm",), ("H100", "H200"), PRODUCTS, MEGATRON),
    "megatron-b200": Fit(
        ("simumaxB200",),
        ("megatron-lm",),
        ("B200", "GB200"),
        (*PRODUCTS, "hop_s"),
        {},
        ("activation_factor", "base_gib"),
    ),
    "nemo-h100": Fit(
        ("dgxc", "dgxc2409", "nemo2407"),
        ("nemo",),
        ("H100", "H200"),
        FP8,
        MEGATRON,
    ),
    "mosaic-h100": Fit(
        ("mosaic",),
        ("llm-foundry fsdp1", "llm-foundry"),
        ("H100", "H200"),
        (*ATTENTION, "fp8_speed"),
        FSDP,
    ),
    "mosaic-a100": Fit(("mosaic",), ("llm-foundry fsdp1",), ("A100",), ATTENTION, FSDP),
    "mosaic-a100-40gb": Fit(("mosaic",), ("llm-foundry fsdp1",), ("A100-40GB",), ATTENTION, FSDP),
    "torchtitan-h100": Fit(
        ("torchtitan2412",),
        ("torchtitan",),
        ("H100", "H200"),
        (*ATTENTION, "fp8_speed"),
        TITAN,
        ("activation_factor", "base_gib"),
    ),
    "torchtitan-tp-h100": Fit(
        ("torchtitan2506tp",), (), ("H100",), (*PRODUCTS, "fp8_speed"), TITAN
    ),
    "torchtitan-a100": Fit(("torchtitanA100",), ("torchtitan",), ("A100",), PRODUCTS, TITAN),
    "maxtext-h100": Fit(("maxtextH100",), ("maxtext",), ("H100",), FP8, PREFETCHED),
    "fms-fsdp": Fit(("fmsfsdp",), ("fms-fsdp",), ("A100", "H100"), PRODUCTS, PREFETCHED),
    "llm.c": Fit(("llmc",), ("llm.c",), ("A100", "H100"), PRODUCTS, CUDA_GRAPHS),
    "nanogpt": Fit(("nanogpt",), ("nanogpt",), ("A100-40GB",), PRODUCTS, {}),
}


def rows_of(fit: Fit, rows: list[dict], key: str) -> list[dict]:
    """The rows that may set the constants: measured, not suspected of a fault."""
    return [
        row
        for row in rows
        if row.get("family") in fit.families
        and row.get("gpu") in fit.gpus
        and row.get("fault_suspect") != "1"
        and measured(row, key)
    ]


def least_squares(residuals, names: tuple[str, ...]) -> dict[str, float]:
    """Constants that minimise Cauchy's loss of `residuals(constants)` and the prior's.

    Levenberg and Marquardt's method in the logarithms of the constants, from the prior's middle,
    with derivatives by differences.
    """
    middle = np.log([PRIOR[name][0] for name in names])
    width = np.array([PRIOR[name][1] for name in names])

    def at(x):
        return residuals(dict(zip(names, np.exp(x).tolist(), strict=True)))

    def loss(x, r):
        return np.log1p((r / SCALE) ** 2).sum() + WEIGHT * (((x - middle) / width) ** 2).sum()

    x, damping = middle, 1e-2
    r = at(x)
    for _ in range(60):
        slopes = np.stack([(at(x + 1e-4 * e) - r) / 1e-4 for e in np.eye(len(x))], axis=1)
        weights = 1 / (SCALE**2 + r**2)
        curvature = slopes.T @ (weights[:, None] * slopes) + np.diag(WEIGHT / width**2)
        downhill = -slopes.T @ (weights * r) - WEIGHT * (x - middle) / width**2
        for _ in range(15):
            damped = curvature + damping * np.diag(np.diag(curvature))
            step = np.clip(np.linalg.solve(damped, downhill), -0.7, 0.7)
            moved = at(x + step)
            better = loss(x, r) - loss(x + step, moved)
            if better > 0:
                break
            damping *= 4
        if better < 1e-9:
            break
        x, r, damping = x + step, moved, max(damping / 5, 1e-9)
    return dict(zip(names, np.exp(x).tolist(), strict=True))


def fitted(fit: Fit, rows: list[dict]) -> Stack:
    """The stack with its constants set on `rows`. Without rows they stay at the prior."""
    stack = Stack(**fit.known)
    for names, key in ((fit.time, "step_time_s"), (fit.memory, "memory_gib")):
        mine = rows_of(fit, rows, key)
        if not mine or not names:
            continue
        model, mesh, cluster = stacked(mine)
        target = np.log([measured(row, key) for row in mine])

        def residuals(constants, stack=stack, key=key, target=target, given=(model, mesh, cluster)):
            changed = dataclasses.replace(stack, **constants)
            model, mesh, cluster = given
            if key == "step_time_s":
                return np.log(step_time.step_s(model, mesh, cluster, changed)) - target
            return np.log(memory.memory_gib(model, mesh, changed)) - target

        stack = dataclasses.replace(stack, **least_squares(residuals, names))
    return stack


def fit_all(rows: list[dict]) -> dict[str, Stack]:
    """All stacks."""
    return {name: fitted(fit, rows) for name, fit in FITS.items()}
