"""The model, the cluster and the mesh of a plan.

Fields are numbers, or arrays of one length. With arrays in its fields one object stands for many
meshes (or many published runs), and each formula of memory.py and step_time.py computes all of them
at once.
"""

import dataclasses
from dataclasses import dataclass

import numpy as np

Number = float | np.ndarray


@dataclass(frozen=True)
class Model:
    """A decoder-only Transformer."""

    layers: Number
    width: Number  # of the residual stream
    heads: Number
    kv_heads: Number
    head_dim: Number
    ffn: Number  # hidden units of the MLP
    gated: Number  # 1: SwiGLU, three matrices; 0: GELU, two matrices
    vocab: Number
    tied: Number  # 1: the output layer is the embedding

    @property
    def layer_parameters(self) -> Number:
        """Weights of the matrices of one layer: query, key, value, output, and the MLP.

        Biases and norms (about 0.02 %) are left out.
        """
        attention = self.width * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        return attention + (2 + self.gated) * self.width * self.ffn

    @property
    def embedding_parameters(self) -> Number:
        """Weights of one embedding table."""
        return self.vocab * self.width

    @property
    def parameters(self) -> Number:
        """All weights: the layers, the embedding and, unless tied, the output layer."""
        return self.layers * self.layer_parameters + (2 - self.tied) * self.embedding_parameters


@dataclass(frozen=True)
class Cluster:
    """Equal nodes. Bandwidths are datasheet numbers in one direction, in 1e9 bytes per second."""

    gpu_memory_gb: Number
    peak_tflops: Number  # dense, of the type that the matrix products use
    hbm_gb_s: Number
    nvlink_gb_s: Number  # of a GPU to the GPUs of its node
    nic_gb_s: Number  # of the network port of a GPU
    gpus_per_node: Number
    fp8: Number = 0  # 1: its matrix units multiply in fp8
    nic_hop_s: Number = 5e-6  # latency of a hop between nodes: InfiniBand 3 to 5 us, EFA 40 to 50


@dataclass(frozen=True)
class Mesh:
    """How ranks share the work. Ranks of a TP group are neighbours, then CP, DP, PP."""

    dp_replicate: Number
    dp_shard: Number
    zero_stage: Number  # 0: DDP; 1: sharded optimizer; 2: gradients too; 3: parameters too (FSDP)
    tp: Number
    sequence_parallel: Number  # 1: the TP ranks share what lies between the matrix products
    pp: Number
    virtual_stages: Number  # per rank; 1: no interleaving
    cp: Number
    micro_batch: Number  # sequences
    accumulation: Number  # micro-batches per step
    sequence: Number  # tokens
    full_checkpointing: Number  # 1: a layer keeps its input only, and is computed again
    selective_checkpointing: Number  # 1: the attention core only is computed again
    flash: Number  # 1: the scores are never written to memory
    fp8: Number = 0  # 1: the matrix products of the layers

    @property
    def gpus(self) -> Number:
        return self.dp_replicate * self.dp_shard * self.tp * self.pp * self.cp

    @property
    def tokens(self) -> Number:
        """Tokens of a micro-batch that a rank holds."""
        return self.micro_batch * self.sequence / self.cp

    @property
    def step_tokens(self) -> Number:
        """Tokens of a step, all ranks together."""
        replicas = self.dp_replicate * self.dp_shard
        return self.micro_batch * self.accumulation * replicas * self.sequence

    @property
    def shards(self) -> Number:
        """Ranks that share the optimizer state. ZeRO-1 shares it among all data parallel ranks."""
        everybody = self.dp_replicate * self.dp_shard * self.cp
        return np.where(self.zero_stage == 3, self.dp_shard * self.cp, everybody)


def columns(objects: list):
    """One object with arrays from a list of objects with numbers."""
    names = [field.name for field in dataclasses.fields(objects[0])]
    arrays = {name: np.array([float(getattr(o, name)) for o in objects]) for name in names}
    return type(objects[0])(**arrays)
