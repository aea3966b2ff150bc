"""Published runs: rows of a CSV file whose header names units, made into models and meshes."""

import csv
from pathlib import Path

from shapes import Cluster, Mesh, Model, columns

PUBLISHED = Path(__file__).with_name("published") / "train_rows.csv"
EFA_HOP_S = 50e-6  # Amazon's network, under the playbook's runs; NCCL's table there says 38 to 51
NEEDED = ("layers", "width", "heads", "sequence", "micro_batch_sequences", "accumulation")


class UnreadableRow(ValueError):
    """A row that lacks what the formulas need."""


def number(row: dict, key: str, default: float | None = None) -> float:
    """A positive number or the default; UnreadableRow if there is neither."""
    try:
        value = float(row.get(key) or "")
    except ValueError:
        value = float("nan")
    if 0 <= value < 1e15:
        return value
    if default is None:
        raise UnreadableRow(f"{key} is {row.get(key)!r}, not a number")
    return default


def parse(row: dict) -> tuple[Model, Mesh, Cluster]:
    """Model, mesh and cluster of a row. Raises UnreadableRow, with the field's name."""
    if any(number(row, key) <= 0 for key in NEEDED):
        raise UnreadableRow(f"one of {', '.join(NEEDED)} is 0")
    width, heads = number(row, "width"), number(row, "heads")
    model = Model(
        layers=number(row, "layers"),
        width=width,
        heads=heads,
        kv_heads=number(row, "kv_heads", heads),
        head_dim=number(row, "head_dim", width / heads),
        ffn=number(row, "ffn", 4 * width),
        gated=number(row, "gated_mlp", 0),
        vocab=number(row, "vocab", 50257),
        tied=number(row, "tied_embedding", 0),
    )
    saving = row.get("activation_checkpointing") or "none"
    mesh = Mesh(
        dp_replicate=max(1, number(row, "dp_replicate", 1)),
        dp_shard=max(1, number(row, "dp_shard", 1)),
        zero_stage=number(row, "zero_stage", 0),
        tp=max(1, number(row, "tp", 1)),
        sequence_parallel=number(row, "sequence_parallel", 0),
        pp=max(1, number(row, "pp", 1)),
        virtual_stages=max(1, number(row, "virtual_stages", 1)),
        cp=max(1, number(row, "cp", 1)),
        micro_batch=number(row, "micro_batch_sequences"),
        accumulation=number(row, "accumulation"),
        sequence=number(row, "sequence"),
        full_checkpointing=saving == "full",
        selective_checkpointing=saving not in ("full", "none"),
        flash=number(row, "flash_attention", 1),
        fp8=row.get("dtype") == "fp8",
    )
    cluster = Cluster(
        gpu_memory_gb=number(row, "gpu_memory_gb", 80),
        peak_tflops=number(row, "peak_bf16_tflops", 989),
        hbm_gb_s=number(row, "hbm_gb_s", 3350),
        nvlink_gb_s=number(row, "nvlink_gb_s_per_direction", 450),
        nic_gb_s=number(row, "nic_gb_s_per_gpu", 50),
        gpus_per_node=max(1, number(row, "gpus_per_node", 8)),
        nic_hop_s=EFA_HOP_S if row.get("software") == "nanotron" else 5e-6,
    )
    return model, mesh, cluster


def read(path: Path) -> list[dict]:
    """The rows of a file, as dictionaries of strings."""
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def stacked(rows: list[dict]) -> tuple[Model, Mesh, Cluster]:
    """Model, mesh and cluster with an array in each field, one element per row."""
    return tuple(columns(list(objects)) for objects in zip(*map(parse, rows), strict=True))


def measured(row: dict, key: str) -> float | None:
    """A measured positive number of a row, or None."""
    value = number(row, key, 0)
    return value or None
