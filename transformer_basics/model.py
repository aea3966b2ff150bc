"""A decoder, GPT-2 or Llama: one readable file that this directory spreads over devices.

Names end in the shape of the tensor:

    B  sequences in the batch     C  width of the model ("channels")    V  size of the vocabulary
    T  tokens of a sequence       H  heads, each of D numbers           K  heads of key and value

A tensor-parallel rank has some of the heads, and `view(B, T, -1, D)` finds out how many.
"""

import math
import zlib
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from attention import attend
from dropout import drop, fold_in
from head import Head, cross_entropy
from tiles import fill_normal, local_part
from torch import Tensor, nn


@dataclass(frozen=True)
class GPTConfig:
    vocab_size: int = 256  # one token per byte
    block_size: int = 256  # longest sequence
    layers: int = 4
    heads: int = 4
    dim: int = 128  # C
    tied: bool = False  # the head's weight is the token embedding's, as in GPT-2
    # gpt2: LayerNorm, a table of positions, GELU, biases.
    # llama: RMSNorm, rotary positions, SwiGLU, no biases; Mistral, SmolLM2 and Qwen, too.
    architecture: str = "gpt2"
    kv_heads: int | None = None  # K: each serves H / K query heads; None: H
    head_dim: int | None = None  # D; None: C / H
    mlp_dim: int | None = None  # None: 4 C
    qkv_bias: bool = False  # a Llama with biases on query, key and value, as Qwen2.5
    qk_norm: bool = False  # RMSNorm of each query and key head, as in Qwen3
    window: int | None = None  # a token sees itself and the window - 1 tokens before it; None: all
    norm_eps: float = 1e-5
    rope_theta: float = 10_000.0
    rope_scaling: tuple[float, ...] | None = None  # Llama 3's factor, low, high, length: `rotary`
    token_count: int | None = None  # rows of the vocabulary from here on are padding; None: none

    def __post_init__(self):
        if self.head_dim is None and self.dim % self.heads:
            raise ValueError(f"dim {self.dim} does not divide into {self.heads} heads")
        head_dim, mlp_dim = self.dim // self.heads, 4 * self.dim
        defaults = {"kv_heads": self.heads, "head_dim": head_dim, "mlp_dim": mlp_dim}
        for name in (name for name in defaults if getattr(self, name) is None):
            object.__setattr__(self, name, defaults[name])  # sets a field of a frozen class
        if self.heads % self.kv_heads:
            raise ValueError(f"{self.heads} heads do not divide over {self.kv_heads} kv_heads")

    @property
    def is_llama(self) -> bool:
        return self.architecture == "llama"

    def flops_per_token(self, length: int) -> int:
        """Floating-point operations per token of a training step on sequences of `length` tokens.

        6 for each weight that is multiplied with (2 in forward, 4 in backward), and 12 T H D per
        layer for attention, without causal or document mask: Chowdhery et al., PaLM, appendix B
        (arXiv 2204.02311). A shorter window replaces T. Recomputed activations are not counted.
        """
        attention = 2 * self.dim * (self.heads + self.kv_heads) * self.head_dim
        mlp = (3 if self.is_llama else 2) * self.dim * self.mlp_dim
        weights = self.layers * (attention + mlp) + self.dim * self.vocab_size
        seen = min(length, self.window or length)
        return 6 * weights + 12 * self.layers * seen * self.heads * self.head_dim


class GPT(nn.Module):
    """Tokens (B, T), int64 -> logits (B, T, V); position t predicts token t + 1.

    With targets (B, T), the last stage returns the mean loss (see `Head`). starts_BT: the index of
    the first token of each token's document, which attention does not leave; None: one document.
    keys_BT: what each token drops follows from its key (dropout.py); None: no dropout.
    A pipeline stage has a part of it, with the names of the full model: the blocks `layers`, on the
    first the embeddings, on the last the head (if tied, with a copy of the embedding). A middle
    stage maps (B, T, C) to (B, T, C).
    """

    def __init__(self, config: GPTConfig, layers: range | None = None, dropout: float = 0.0):
        super().__init__()
        layers = range(config.layers) if layers is None else layers
        self.config, self.dropout = config, dropout
        self.is_first, self.is_last = layers.start == 0, layers.stop == config.layers
        self.positions = torch.arange  # (T, device=) -> (T): another, if tokens are sharded
        if self.is_first or (self.is_last and config.tied):
            self.token_embedding = nn.Embedding(config.vocab_size, config.dim)
        if self.is_first and not config.is_llama:
            self.position_embedding = nn.Embedding(config.block_size, config.dim)
        self.blocks = nn.ModuleDict({str(i): Block(config, dropout) for i in layers})
        if self.is_last:
            self.norm = make_norm(config)
            self.head = Head(config.dim, config.vocab_size, cross_entropy, config.token_count)
        self.tie()

    def tie(self) -> None:
        """Give the head the embedding's weight if so configured: again after they were replaced."""
        if self.config.tied and self.is_last:
            self.head.weight = self.token_embedding.weight

    def forward(self, x: Tensor, targets_BT=None, starts_BT=None, keys_BT=None) -> Tensor:
        if self.is_first:
            positions = self.positions(x.shape[1], device=x.device)  # (T), or (B, T):
            positions = positions if starts_BT is None else positions - starts_BT
            x = self.token_embedding(x)
            if not self.config.is_llama:  # a Llama's attention rotates queries and keys
                x = x + self.position_embedding(positions)
            x = drop(x, self.dropout, fold_in(keys_BT, 0))
        for i, block in self.blocks.items():
            x = block(x, starts_BT, fold_in(keys_BT, 1 + int(i)))
        return self.head(self.norm(x), targets_BT=targets_BT) if self.is_last else x


def make_norm(config: GPTConfig) -> nn.Module:
    norm = nn.RMSNorm if config.is_llama else nn.LayerNorm
    return norm(config.dim, eps=config.norm_eps)


class Block(nn.Module):
    """(B, T, C) -> (B, T, C): tokens look back at earlier ones, then each is worked on alone."""

    def __init__(self, config: GPTConfig, dropout: float = 0.0):
        super().__init__()
        self.dropout = dropout
        self.attention_norm, self.mlp_norm = make_norm(config), make_norm(config)
        self.attention, self.mlp = Attention(config), MLP(config)

    def forward(self, x_BTC: Tensor, starts_BT=None, keys_BT=None) -> Tensor:
        y_BTC = self.attention(self.attention_norm(x_BTC), starts_BT=starts_BT)
        x_BTC = x_BTC + drop(y_BTC, self.dropout, fold_in(keys_BT, 0))
        y_BTC = self.mlp(self.mlp_norm(x_BTC))
        return x_BTC + drop(y_BTC, self.dropout, fold_in(keys_BT, 1))


class Attention(nn.Module):
    """Query, key and value are layers of their own, so that each can be cut between heads."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.config, self.head_dim, has_bias = config, config.head_dim, not config.is_llama
        self.attend, self.positions = attend, torch.arange  # replaced, if tokens are sharded
        queries, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim
        qkv_bias = has_bias or config.qkv_bias
        self.query = nn.Linear(config.dim, queries, bias=qkv_bias)
        # Softmax ignores GPT-2's bias here (not Qwen2.5's, rotated): AdamW would enlarge rounding.
        self.key = nn.Linear(config.dim, keys, bias=config.qkv_bias)
        self.value = nn.Linear(config.dim, keys, bias=qkv_bias)
        self.out = nn.Linear(queries, config.dim, bias=has_bias)
        if config.qk_norm:
            self.query_norm = nn.RMSNorm(config.head_dim, eps=config.norm_eps)
            self.key_norm = nn.RMSNorm(config.head_dim, eps=config.norm_eps)

    def forward(self, x_BTC: Tensor, starts_BT: Tensor | None = None) -> Tensor:
        q_BHTD, k_BKTD, v_BKTD = (
            y.view(*y.shape[:2], -1, self.head_dim).transpose(1, 2)
            for y in (self.query(x_BTC), self.key(x_BTC), self.value(x_BTC))
        )
        if self.config.qk_norm:
            q_BHTD, k_BKTD = self.query_norm(q_BHTD), self.key_norm(k_BKTD)
        if self.config.is_llama:
            positions_T = self.positions(x_BTC.shape[1], device=x_BTC.device)
            cos_TD, sin_TD = rotary(self.config, positions_T)
            q_BHTD, k_BKTD = rotate(q_BHTD, cos_TD, sin_TD), rotate(k_BKTD, cos_TD, sin_TD)
        documents = () if starts_BT is None else (starts_BT,)
        seen_BHTD = self.attend(q_BHTD, k_BKTD, v_BKTD, self.config.window, *documents)
        return self.out(seen_BHTD.transpose(1, 2).flatten(2))


def rotary(config: GPTConfig, positions_T: Tensor) -> tuple[Tensor, Tensor]:
    """Cosine and sine of the angle of each position and pair of numbers: (T, D / 2), float32.

    Pair i turns by theta^(-2i / D) per token: Su et al., RoFormer (arXiv 2104.09864). For
    Llama 3's long sequences, a pair that turns less than `low` times in `pretrained` tokens is
    slowed down by `factor`, one that turns more than `high` times is not; between, interpolated.
    """
    exponents = torch.arange(0, config.head_dim, 2, device=positions_T.device) / config.head_dim
    frequencies = 1 / config.rope_theta**exponents
    if config.rope_scaling:
        factor, low, high, pretrained = config.rope_scaling
        turns = pretrained * frequencies / (2 * math.pi)
        kept = ((turns - low) / (high - low)).clamp(0, 1)
        frequencies = frequencies * (kept + (1 - kept) / factor)
    angles = positions_T[:, None] * frequencies
    return angles.cos(), angles.sin()


def rotate(x_BHTD: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> Tensor:
    """Turn the pairs (i, i + D / 2) of each head by its position's angles, in float32."""
    a, b = x_BHTD.float().chunk(2, dim=-1)
    turned = torch.cat([a * cos_TD - b * sin_TD, b * cos_TD + a * sin_TD], dim=-1)
    return turned.to(x_BHTD.dtype)


class MLP(nn.Module):
    def __init__(self, config: GPTConfig):
        super().__init__()
        self.expand = nn.Linear(config.dim, config.mlp_dim, bias=not config.is_llama)
        self.contract = nn.Linear(config.mlp_dim, config.dim, bias=not config.is_llama)
        self.gate = nn.Linear(config.dim, config.mlp_dim, bias=False) if config.is_llama else None

    def forward(self, x_BTC: Tensor) -> Tensor:
        expanded = self.expand(x_BTC)
        if self.gate is not None:  # SwiGLU: Shazeer (arXiv 2002.05202)
            return self.contract(F.silu(self.gate(x_BTC)) * expanded)
        return self.contract(F.gelu(expanded, approximate="tanh"))


@torch.no_grad()
def initialize(model: GPT, seed: int) -> GPT:
    """Give every parameter GPT-2's first values, the same for any way to spread the model.

    Each tile of a matrix has random numbers of its own, drawn from `seed`, the parameter's name and
    the tile's place. A rank draws the tiles of which it holds a part, on its device: no rank sends
    or holds a full matrix. (Another device type draws other numbers.) Call it after sharding.
    """
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            local_part(parameter).zero_()
        elif "norm" in name:
            local_part(parameter).fill_(1)
        else:
            # Radford et al. (2019), section 2.3: each block adds twice to one sum; small values in
            # the last layer of what is added keep its variance independent of the depth.
            adds = name.endswith(("attention.out.weight", "mlp.contract.weight"))
            depth = (2 * model.config.layers) ** 0.5
            std = 0.02 / depth if adds else 0.02
            fill_normal(parameter, std, seed=zlib.crc32(f"{seed} {name}".encode()))
    return model
