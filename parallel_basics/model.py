"""A GPT-2: one readable decoder that every file of this directory spreads over devices.

Names end in the shape of the tensor:

    B  sequences in the batch     C  width of the model ("channels")    V  size of the vocabulary
    T  tokens of a sequence       H  heads, each of D = C / H numbers

A rank of a tensor-parallel group computes some of the heads only. `view(B, T, -1, D)` then finds
out how many: nothing in this file knows about ranks.
"""

import zlib
from dataclasses import dataclass
from itertools import product

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.utils.checkpoint import checkpoint


@dataclass(frozen=True)
class GPTConfig:
    vocab_size: int = 256  # one token per byte
    block_size: int = 256  # longest sequence
    layers: int = 4
    heads: int = 4
    dim: int = 128  # C
    tied: bool = False  # the head's weight is the token embedding's, as in GPT-2

    def __post_init__(self):
        if self.dim % self.heads:
            raise ValueError(f"dim {self.dim} does not divide into {self.heads} heads")

    def flops_per_token(self, length: int) -> int:
        """Floating-point operations per token of a training step on sequences of `length` tokens.

        6 for each weight that is multiplied with (2 in forward, 4 in backward), and 12 T C per
        layer for attention, counted without the causal mask: Chowdhery et al., PaLM, appendix B
        (arXiv 2204.02311). Recomputed activations are not counted: they are no progress.
        """
        weights = 12 * self.layers * self.dim**2 + self.dim * self.vocab_size
        return 6 * weights + 12 * self.layers * length * self.dim


class GPT(nn.Module):
    """Tokens (B, T), int64 -> logits (B, T, V); position t predicts token t + 1.

    A pipeline stage has a part of it: `layers` says which blocks; the embeddings belong to the
    first, the head to the last. A stage in the middle maps (B, T, C) to (B, T, C). Parameters have
    the same names as in the whole model.
    """

    def __init__(self, config: GPTConfig, layers: range | None = None):
        super().__init__()
        layers = range(config.layers) if layers is None else layers
        self.config = config
        self.is_first, self.is_last = layers.start == 0, layers.stop == config.layers
        if self.is_first:
            self.token_embedding = nn.Embedding(config.vocab_size, config.dim)
            self.position_embedding = nn.Embedding(config.block_size, config.dim)
        self.blocks = nn.ModuleDict({str(i): Block(config) for i in layers})
        if self.is_last:
            self.norm = nn.LayerNorm(config.dim)
            self.head = nn.Linear(config.dim, config.vocab_size, bias=False)
        self.tie()

    def tie(self) -> None:
        """Give the head the embedding's weight if so configured: again after they were replaced."""
        if self.config.tied:
            if not (self.is_first and self.is_last):
                raise ValueError(
                    "a tied model cannot be cut into stages: both would need the weight"
                )
            self.head.weight = self.token_embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        if self.is_first:
            positions_T = torch.arange(x.shape[1], device=x.device)
            x = self.token_embedding(x) + self.position_embedding(positions_T)
        for block in self.blocks.values():
            x = block(x)
        return self.head(self.norm(x)) if self.is_last else x


class Block(nn.Module):
    """(B, T, C) -> (B, T, C): tokens look back at earlier ones, then each is worked on alone."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.recompute = False  # True: keep no activations, compute them again in backward
        self.attention_norm, self.mlp_norm = nn.LayerNorm(config.dim), nn.LayerNorm(config.dim)
        self.attention, self.mlp = Attention(config), MLP(config)

    def forward(self, x_BTC: Tensor) -> Tensor:
        if self.recompute and torch.is_grad_enabled():
            return checkpoint(self.compute, x_BTC, use_reentrant=False)
        return self.compute(x_BTC)

    def compute(self, x_BTC: Tensor) -> Tensor:
        x_BTC = x_BTC + self.attention(self.attention_norm(x_BTC))
        return x_BTC + self.mlp(self.mlp_norm(x_BTC))


class Attention(nn.Module):
    """Query, key and value are layers of their own, so that each can be cut between heads."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.head_dim = config.dim // config.heads
        self.query = nn.Linear(config.dim, config.dim)
        # GPT-2 has a bias here. It adds one number to all scores of a query, which softmax ignores:
        # its gradient is zero but for rounding, which AdamW would blow up to full steps.
        self.key = nn.Linear(config.dim, config.dim, bias=False)
        self.value = nn.Linear(config.dim, config.dim)
        self.out = nn.Linear(config.dim, config.dim)

    def forward(self, x_BTC: Tensor) -> Tensor:
        q_BHTD, k_BHTD, v_BHTD = (
            # The heads on this rank: all of them without tensor parallelism.
            y.view(*y.shape[:2], -1, self.head_dim).transpose(1, 2)
            for y in (self.query(x_BTC), self.key(x_BTC), self.value(x_BTC))
        )
        seen_BHTD = F.scaled_dot_product_attention(q_BHTD, k_BHTD, v_BHTD, is_causal=True)
        return self.out(seen_BHTD.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self, config: GPTConfig):
        super().__init__()
        self.expand = nn.Linear(config.dim, 4 * config.dim)
        self.contract = nn.Linear(4 * config.dim, config.dim)

    def forward(self, x_BTC: Tensor) -> Tensor:
        return self.contract(F.gelu(self.expand(x_BTC), approximate="tanh"))


def cross_entropy(logits_BTV: Tensor, targets_BT: Tensor) -> Tensor:
    """The mean over all tokens, in nats; computed in float32."""
    return F.cross_entropy(logits_BTV.flatten(0, 1).float(), targets_BT.flatten())


TILE = 512  # rows and columns of what is drawn at a time: 1 MB


@torch.no_grad()
def initialize(model: GPT, seed: int) -> GPT:
    """Give every parameter GPT-2's first values, the same for any way to spread the model.

    Each tile of a matrix has random numbers of its own, drawn from `seed`, the parameter's name and
    the tile's place. A rank draws the tiles of which it holds a part, on its device: nothing is
    sent, and no matrix is ever whole on a rank that holds a shard. (Another kind of device draws
    other numbers.) Call it when the model has been cut and sharded.
    """
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            local_part(parameter).zero_()
        elif "norm" in name:
            local_part(parameter).fill_(1)
        else:
            # Radford et al. (2019), section 2.3: each block adds twice to the same sum; smaller
            # values in the last layer of what is added keep its variance independent of the depth.
            adds = name.endswith(("attention.out.weight", "mlp.contract.weight"))
            depth = (2 * model.config.layers) ** 0.5
            std = 0.02 / depth if adds else 0.02
            fill_normal(parameter, std, seed=zlib.crc32(f"{seed} {name}".encode()))
    return model


def fill_normal(matrix: Tensor, std: float, seed: int) -> None:
    """Fill what this rank holds of `matrix`, tile by tile."""
    rows, columns = (indices_here(matrix, dim) for dim in (0, 1))
    generator = torch.Generator(matrix.device)
    for row, column in product(tiles(rows), tiles(columns)):
        generator.manual_seed(seed + row * matrix.shape[1] + column)  # of the tile's first number
        sizes = [min(TILE, n - i) for n, i in zip(matrix.shape, (row, column), strict=True)]
        tile = torch.empty(sizes, device=matrix.device).normal_(0, std, generator=generator)
        top, left = max(row, rows.start), max(column, columns.start)
        part = tile[top - row : rows.stop - row, left - column : columns.stop - column]
        here = local_part(matrix)[top - rows.start :, left - columns.start :]
        here[: part.shape[0], : part.shape[1]] = part


def tiles(indices: range) -> range:
    """The first rows, or columns, of the tiles that hold some of these."""
    return range(indices.start // TILE * TILE, indices.stop, TILE)


def indices_here(tensor: Tensor, dim: int) -> range:
    """The rows (dim 0) or columns (1) of `tensor` that this rank holds: neighbours, or none."""
    if not isinstance(tensor, DTensor):
        return range(tensor.shape[dim])
    # Numbers that are cut as the tensor is; `distribute_tensor` knows every kind of shard.
    numbers = torch.arange(tensor.shape[dim]).unsqueeze(1 - dim)
    cuts = [p if not p.is_replicate() and p.dim == dim else Replicate() for p in tensor.placements]
    numbers = distribute_tensor(numbers, tensor.device_mesh, cuts, src_data_rank=None)
    here = numbers.to_local().flatten().tolist()
    return range(here[0], here[-1] + 1) if here else range(0)


def local_part(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


# ---- the same model in transformers: GPT2LMHeadModel

LAYERS = {  # ours -> theirs, within a block; each has a weight and a bias
    "attention_norm": "ln_1",
    "attention.out": "attn.c_proj",
    "mlp_norm": "ln_2",
    "mlp.expand": "mlp.c_fc",
    "mlp.contract": "mlp.c_proj",
}


def to_hugging_face(state: dict[str, Tensor], config: GPTConfig) -> dict[str, Tensor]:
    """Our state dict -> that of transformers' GPT2LMHeadModel."""
    new = {
        "transformer.wte.weight": state["token_embedding.weight"],
        "transformer.wpe.weight": state["position_embedding.weight"],
        "transformer.ln_f.weight": state["norm.weight"],
        "transformer.ln_f.bias": state["norm.bias"],
        "lm_head.weight": state["head.weight"],
    }
    for i in range(config.layers):
        ours, theirs = f"blocks.{i}.", f"transformer.h.{i}."
        query, key, value = (f"{ours}attention.{name}." for name in ("query", "key", "value"))
        weights = [state[part + "weight"] for part in (query, key, value)]
        biases = [state[query + "bias"], torch.zeros(config.dim), state[value + "bias"]]
        # Their layers compute x @ weight: all but norms are transposed.
        new[theirs + "attn.c_attn.weight"] = torch.cat(weights).T.contiguous()
        new[theirs + "attn.c_attn.bias"] = torch.cat(biases)
        for a, b in LAYERS.items():
            weight = state[f"{ours}{a}.weight"]
            new[f"{theirs}{b}.weight"] = weight if weight.dim() == 1 else weight.T.contiguous()
            new[f"{theirs}{b}.bias"] = state[f"{ours}{a}.bias"]
    return new


def from_hugging_face(state: dict[str, Tensor], config: GPTConfig) -> dict[str, Tensor]:
    """The state dict of transformers' GPT2LMHeadModel -> ours. The key's bias has no effect."""
    new = {
        "token_embedding.weight": state["transformer.wte.weight"],
        "position_embedding.weight": state["transformer.wpe.weight"],
        "norm.weight": state["transformer.ln_f.weight"],
        "norm.bias": state["transformer.ln_f.bias"],
        "head.weight": state["lm_head.weight"],
    }
    for i in range(config.layers):
        ours, theirs = f"blocks.{i}.", f"transformer.h.{i}."
        weights = state[theirs + "attn.c_attn.weight"].T.chunk(3)
        biases = state[theirs + "attn.c_attn.bias"].chunk(3)
        for name, weight, bias in zip(("query", "key", "value"), weights, biases, strict=True):
            new[f"{ours}attention.{name}.weight"] = weight.contiguous()
            if name != "key":
                new[f"{ours}attention.{name}.bias"] = bias.contiguous()
        for a, b in LAYERS.items():
            weight = state[f"{theirs}{b}.weight"]
            new[f"{ours}{a}.weight"] = weight if weight.dim() == 1 else weight.T.contiguous()
            new[f"{ours}{a}.bias"] = state[f"{theirs}{b}.bias"]
    return new
