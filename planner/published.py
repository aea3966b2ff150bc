"""Published runs: rows of a CSV file whose header names units, made into models and meshes."""

import csv
from pathlib import Path

from shapes import Cluster, Mesh, Model, columns

PUBLISHED = Path(__file__).with_name("train_rows.csv")
EFA_HOP_S = 50e-6  # Amazon's network, under the playbook's runs; NCCL's table there says 38 to 51
LARGEST = 1e12  # of a number in a row: what is above is a mistake


class UnreadableRow(ValueError):
    """A row that lacks what the formulas need."""


def number(row: dict, key: str, default: float | None = None) -> float:
    """A number that is not negative, or the default; UnreadableRow if there is neither."""
    try:
        value = float(row.get(key) or "")
    except ValueError:
        value = float("nan")
    if 0 <= value < LARGEST:
        return value
    if default is None:
        raise UnreadableRow(f"{key} is not a number")
    return default


def positive(row: dict, key: str, default: float | None = None) -> float:
    """A number above 0, or the default; UnreadableRow if there is neither."""
    value = number(row, key, default)
    if value == 0 and default is None:
        raise UnreadableRow(f"{key} is 0")
    return value or default


def parse(row: dict) -> tuple[Model, Mesh, Cluster]:
    """Model, mesh and cluster of a row. Raises UnreadableRow, with the field's name."""
    width, heads = positive(row, "width"), positive(row, "heads")
    model = Model(
        layers=positive(row, "layers"),
        width=width,
        heads=heads,
        kv_heads=positive(row, "kv_heads", heads),
        head_dim=positive(row, "head_dim", width / heads),
        ffn=positive(row, "ffn", 4 * width),
        gated=number(row, "gated_mlp", 0),
        vocab=positive(row, "vocab", 50257),
        tied=number(row, "tied_embedding", 0),
    )
    saving = row.get("activation_checkpointing") or "none"
    mesh = Mesh(
        dp_replicate=positive(row, "dp_replicate", 1),
        dp_shard=positive(row, "dp_shard", 1),
        zero_stage=number(row, "zero_stage", 0),
        tp=positive(row, "tp", 1),
        sequence_parallel=number(row, "sequence_parallel", 0),
        pp=positive(row, "pp", 1),
        virtual_stages=positive(row, "virtual_stages", 1),
        cp=positive(row, "cp", 1),
        micro_batch=positive(row, "micro_batch_sequences"),
        accumulation=positive(row, "accumulation"),
        sequence=positive(row, "sequence"),
        full_checkpointing=saving == "full",
        selective_checkpointing=saving not in ("full", "none"),
        flash=number(row, "flash_attention", 1),
        fp8=row.get("dtype") == "fp8",
    )
    cluster = Cluster(
        gpu_memory_gb=positive(row, "gpu_memory_gb", 80),
        peak_tflops=positive(row, "peak_bf16_tflops", 989),
        hbm_gb_s=positive(row, "hbm_gb_s", 3350),
        nvlink_gb_s=positive(row, "nvlink_gb_s_per_direction", 450),
        nic_gb_s=positive(row, "nic_gb_s_per_gpu", 50),
        gpus_per_node=positive(row, "gpus_per_node", 8),
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
