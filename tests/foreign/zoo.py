"""Models of torchvision and transformers, tiny and random, with a small batch for each of them.

An entry says what a task.py says: the samples, the model, its units for FSDP, and what one batch
means. No dropout and no other random numbers after the first values, so that runs can be compared.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn
from torchvision import models as vision
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    CLIPModel,
    Wav2Vec2ForSequenceClassification,
)
from transformers import AutoModelForImageClassification as ForImages
from transformers import AutoModelForSeq2SeqLM as Seq2Seq
from transformers import AutoModelForSpeechSeq2Seq as Speech

VOCABULARY, LENGTH, CLASSES = 48, 10, 5
IGNORED = -100  # the label of a token that does not count, as everywhere in transformers


@dataclass(frozen=True)
class Entry:
    make: Callable[[], nn.Module]
    samples: Callable[[int], list]  # a number -> that many samples, the same on every call
    loss: Callable  # (model, batch) -> (sum of losses, count, other sums)
    blocks: str  # where the blocks are, by name: "model.layers" (several: with spaces)
    collate: Callable | None = None
    unused: bool = False  # whether some parameters take no part in its loss
    language: bool = False  # whether it generates text
    refused: tuple[str, str, str] = ("", "", "")  # see REFUSED in variants.py
    by_sample: bool = True  # False: a sample's loss depends on the others of its batch

    def units(self, model: nn.Module) -> list[nn.Module]:
        parts = [model.get_submodule(name) for name in self.blocks.split()]
        blocks = [block for part in parts for block in blocks_of(part)]
        return [block for block in blocks if list(block.parameters())]


def blocks_of(part: nn.Module) -> list[nn.Module]:
    """The modules in a list; what is no list is one block."""
    return list(part) if isinstance(part, nn.ModuleList | nn.Sequential) else [part]


# ---- samples and losses


def random(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def images(count: int, size: int = 32) -> list:
    r = random(count)
    return [(torch.rand(3, size, size, generator=r), i % CLASSES) for i in range(count)]


def texts(count: int, masked: bool = False) -> list:
    """Of different lengths: each sample has its own number of labels that count."""
    r, found = random(count), []
    for _ in range(count):
        words = torch.randint(5, VOCABULARY, (LENGTH,), generator=r)
        length = int(torch.randint(3, LENGTH + 1, (), generator=r))
        used = torch.arange(LENGTH) < length
        labels = torch.where(used, words, IGNORED)
        if masked:
            words = torch.where(torch.arange(LENGTH) % 3 == 1, 4, words)  # 4: the mask
        sample = {"input_ids": torch.where(used, words, 1), "attention_mask": used.long()}
        found.append(sample | {"labels": labels})
    return found


def lines(count: int) -> list:
    """Texts that are not padded yet: (words, label of each word)."""
    return [
        (sample["input_ids"][:length], sample["labels"][:length])
        for sample in texts(count)
        for length in [int(sample["attention_mask"].sum())]
    ]


def pad(samples: list) -> dict[str, torch.Tensor]:
    """A collate function: to the longest of these samples, so that ranks differ in shape."""
    words, labels = zip(*samples, strict=True)
    together = partial(nn.utils.rnn.pad_sequence, batch_first=True)
    return {
        "input_ids": together(words, padding_value=1),
        "attention_mask": together([torch.ones_like(w) for w in words]),
        "labels": together(labels, padding_value=IGNORED),
    }


def sounds(count: int) -> list:
    r = random(count)
    return [
        {"input_features": torch.randn(8, 40, generator=r), "labels": sample["labels"]}
        for sample in texts(count)
    ]


def waves(count: int) -> list:
    r = random(count)
    return [(torch.randn(400, generator=r), i % CLASSES) for i in range(count)]


def captioned(count: int) -> list:
    pairs = zip(images(count, 16), texts(count), strict=True)
    return [{"pixel_values": image, "input_ids": text["input_ids"]} for (image, _), text in pairs]


def classify(model: nn.Module, batch) -> tuple:
    inputs, labels = batch
    scores = model(inputs)
    scores = getattr(scores, "logits", scores)  # transformers returns more than the scores
    correct = (scores.argmax(1) == labels).sum()
    return F.cross_entropy(scores, labels, reduction="sum"), len(labels), {"correct": correct}


def tokens(scores: torch.Tensor, labels: torch.Tensor) -> tuple:
    scores, labels = scores.flatten(0, 1), labels.flatten()
    losses = F.cross_entropy(scores, labels, ignore_index=IGNORED, reduction="sum")
    correct = (scores.argmax(1) == labels).sum()
    return losses, (labels != IGNORED).sum(), {"correct": correct}


def next_token(model: nn.Module, batch: dict) -> tuple:
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    scores = model(**inputs).logits
    return tokens(scores[:, :-1], batch["labels"][:, 1:])


def hidden_token(model: nn.Module, batch: dict) -> tuple:
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    return tokens(model(**inputs).logits, batch["labels"])


def from_source(model: nn.Module, batch: dict) -> tuple:
    """Encoder and decoder: the model makes the decoder's inputs from the labels."""
    return tokens(model(**batch).logits, batch["labels"])


def contrast(model: nn.Module, batch: dict) -> tuple:
    """Each image and its text, against the others of the same part of the batch."""
    scores = model(**batch).logits_per_image
    which = torch.arange(len(scores), device=scores.device)
    both = F.cross_entropy(scores, which, reduction="sum")
    return both + F.cross_entropy(scores.T, which, reduction="sum"), 2 * len(scores), {}


# ---- torchvision


def resnet() -> nn.Module:
    class Narrow(vision.ResNet):
        def _make_layer(self, block, planes, *rest, **options):
            return super()._make_layer(block, planes // 16, *rest, **options)

    model = Narrow(vision.resnet.BasicBlock, [2, 1, 1, 1])
    model.fc = nn.Linear(32, CLASSES)
    return model


def efficientnet() -> nn.Module:
    stage = partial(vision.efficientnet.MBConvConfig, width_mult=1, depth_mult=1)
    stages = [stage(1, 3, 2, 8, 8, 2), stage(2, 3, 2, 8, 16, 2)]
    return vision.EfficientNet(stages, 0.0, stochastic_depth_prob=0, num_classes=CLASSES)


def mobilenet_v3() -> nn.Module:
    stage = partial(vision.mobilenetv3.InvertedResidualConfig, dilation=1, width_mult=1)
    stages = [stage(8, 3, 16, 8, True, "RE", 2), stage(8, 5, 16, 16, False, "HS", 2)]
    model = vision.MobileNetV3(stages, 32, num_classes=CLASSES)
    model.classifier[2].p = 0.0
    return model


def vgg() -> nn.Module:
    features = vision.vgg.make_layers([8, "M", 16, 16, 16, "M"], batch_norm=True)
    model = vision.VGG(features, num_classes=CLASSES, dropout=0.0)
    model.avgpool = nn.AdaptiveAvgPool2d(1)
    model.classifier = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, CLASSES))
    return model


def regnet() -> nn.Module:
    blocks = vision.regnet.BlockParams([1, 1], [8, 16], [4, 4], [1.0, 1.0], [2, 2], 0.25)
    return vision.RegNet(blocks, num_classes=CLASSES, stem_width=8)


def convnext() -> nn.Module:
    stage = vision.convnext.CNBlockConfig
    stages = [stage(8, 16, 2), stage(16, None, 1)]
    return vision.ConvNeXt(stages, layer_scale=0.5, num_classes=CLASSES)


def vit() -> nn.Module:
    return vision.VisionTransformer(16, 4, 2, 2, 16, 32, num_classes=CLASSES)


def swin(version: int) -> nn.Module:
    block, merging = {
        1: (None, vision.swin_transformer.PatchMerging),
        2: (vision.swin_transformer.SwinTransformerBlockV2, vision.swin_transformer.PatchMergingV2),
    }[version]
    sizes = {"patch_size": [4, 4], "embed_dim": 8, "depths": [2, 2], "num_heads": [2, 2]}
    return vision.SwinTransformer(
        **sizes,
        window_size=[4, 4],
        stochastic_depth_prob=0.0,
        num_classes=CLASSES,
        block=block,
        downsample_layer=merging,
    )


def maxvit() -> nn.Module:
    return vision.MaxVit(
        (32, 32), 8, 2, [8, 16], [1, 1], 8, stochastic_depth_prob=0.0, num_classes=CLASSES
    )


def of_images(make: Callable[[], nn.Module], blocks: str, size: int = 32, **more) -> Entry:
    return Entry(make, partial(images, size=size), classify, blocks, **more)


# ---- transformers

SMALL = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 32,
    "pad_token_id": 1,
    "bos_token_id": 2,
    "eos_token_id": 3,
    "tie_word_embeddings": False,
    "num_labels": CLASSES,
}
ABSENT = object()
NO_DROPOUT = dict.fromkeys(
    (
        "dropout",
        "dropout_rate",
        "attention_dropout",
        "activation_dropout",
        "hidden_dropout",
        "hidden_dropout_prob",
        "attention_probs_dropout_prob",
        "embd_pdrop",
        "resid_pdrop",
        "attn_pdrop",
        "embed_dropout",
        "embedding_dropout",
        "classifier_dropout",
        "classifier_dropout_prob",
        "layerdrop",
        "feat_proj_dropout",
        "final_dropout",
    ),
    0.0,
)


def of_hub(kind: type, name: str, **changes) -> nn.Module:
    """A model with random values, of the architecture that the hub calls `name`."""
    options = {k: v for k, v in (SMALL | NO_DROPOUT | changes).items() if v is not ABSENT}
    config = AutoConfig.for_model(name, **options)
    # The default for experts is a product that only knows numbers of 32 bits and fewer.
    return kind.from_config(config, experts_implementation="eager")


def causal(name: str, blocks: str = "model.layers", **options) -> Entry:
    make = partial(of_hub, AutoModelForCausalLM, name, **options)
    return Entry(make, texts, next_token, blocks, language=True)


def masked(name: str, blocks: str, unused: bool = False, **options) -> Entry:
    make = partial(of_hub, AutoModelForMaskedLM, name, **options)
    samples = partial(texts, masked=True)
    return Entry(make, samples, hidden_token, blocks, unused=unused)


def seq2seq(
    kind: type, name: str, blocks: str, samples=lines, collate=pad, unused: bool = False, **options
) -> Entry:
    make = partial(of_hub, kind, name, decoder_start_token_id=2, **options)
    return Entry(make, samples, from_source, blocks, collate, unused, language=kind is Seq2Seq)


def clip() -> nn.Module:
    tower = {name: value for name, value in SMALL.items() if name.startswith(("hidden", "inter"))}
    tower |= {"num_hidden_layers": 2, "num_attention_heads": 2, "attention_dropout": 0.0}
    words = {"vocab_size": VOCABULARY, "max_position_embeddings": LENGTH, "eos_token_id": 3}
    picture = {"image_size": 16, "patch_size": 8}
    config = {"text_config": tower | words, "vision_config": tower | picture, "projection_dim": 8}
    return CLIPModel(AutoConfig.for_model("clip", **config))


def clip_1d() -> nn.Module:
    model = clip()
    model.logit_scale = nn.Parameter(model.logit_scale.detach().reshape(1))
    return model


def wav2vec2() -> nn.Module:
    convolutions = {"conv_dim": (8, 8), "conv_stride": (5, 2), "conv_kernel": (10, 3)}
    config = AutoConfig.for_model(
        "wav2vec2",
        **(SMALL | NO_DROPOUT),
        **convolutions,
        num_conv_pos_embeddings=4,
        num_conv_pos_embedding_groups=2,
        apply_spec_augment=False,
        classifier_proj_size=8,
    )
    return Wav2Vec2ForSequenceClassification(config)


EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
TOWERS = "text_model.encoder.layers vision_model.encoder.layers"
GPT2 = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32, "n_inner": 32}
STATES = {"state_size": 4, "conv_kernel": 4, "expand": 2}
BART = {
    "d_model": 16,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32,
}
DEEPSEEK = {
    "n_routed_experts": 4,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 8,
    "head_dim": 4,
    "num_key_value_heads": 2,
}

GROUPS = {
    "torchvision": {
        "ResNet": of_images(resnet, "layer1 layer2 layer3 layer4", 48),
        "VGG with BatchNorm": of_images(vgg, "features", 16),
        "DenseNet": of_images(
            lambda: vision.DenseNet(4, (2, 2), 8, 2, num_classes=CLASSES),
            "features.denseblock1 features.denseblock2",
        ),
        "MobileNetV2": of_images(
            lambda: vision.MobileNetV2(CLASSES, 0.25, [[1, 8, 2, 2], [2, 16, 1, 2]], dropout=0.0),
            "features",
        ),
        "MobileNetV3": of_images(mobilenet_v3, "features"),
        "ShuffleNetV2": of_images(
            lambda: vision.ShuffleNetV2([1, 1, 1], [8, 8, 16, 16, 32], num_classes=CLASSES),
            "stage2 stage3 stage4",
        ),
        "EfficientNet": of_images(efficientnet, "features"),
        "RegNet": of_images(regnet, "trunk_output"),
        "ConvNeXt": of_images(convnext, "features"),
        "ViT (torchvision)": of_images(vit, "encoder.layers", 16),
        "Swin": of_images(partial(swin, 1), "features"),
        "SwinV2": of_images(partial(swin, 2), "features"),
        "MaxViT": of_images(maxvit, "blocks"),
    },
    "transformers: decoders": {
        "Llama": causal("llama"),
        "Mistral": causal("mistral", sliding_window=4),
        "Qwen2": causal("qwen2"),
        "Qwen3": causal("qwen3"),
        "Gemma": causal("gemma"),
        "Gemma 2": causal("gemma2", sliding_window=16),
        "Gemma 3": causal("gemma3_text", sliding_window=4),
        "GPT-2": causal("gpt2", "transformer.h", **GPT2),
        "GPT-Neo": causal(
            "gpt_neo",
            "transformer.h",
            num_layers=2,
            num_heads=2,
            attention_types=[[["global", "local"], 1]],
            window_size=4,
        ),
        "GPT-NeoX": causal("gpt_neox", "gpt_neox.layers"),
        "OPT": causal("opt", "model.decoder.layers", ffn_dim=32, word_embed_proj_dim=16),
        "Phi": causal("phi"),
        "Phi-3": causal("phi3"),
        "BLOOM": causal("bloom", "transformer.h", n_head=2, n_layer=2),
        "Falcon": causal("falcon", "transformer.h", head_dim=ABSENT),
        "OLMo 2": causal("olmo2"),
        "Mixtral": causal("mixtral", num_local_experts=4),
        "Qwen2-MoE": causal(
            "qwen2_moe", num_experts=4, shared_expert_intermediate_size=16, **EXPERTS
        ),
        "gpt-oss": causal("gpt_oss", num_local_experts=4, num_experts_per_tok=2, sliding_window=4),
        "DeepSeek-V3": causal("deepseek_v3", **DEEPSEEK, **EXPERTS),
        "Mamba": causal("mamba", "backbone.layers", time_step_rank=2, **STATES),
        "Mamba-2": causal(
            "mamba2", "backbone.layers", num_heads=4, n_groups=1, chunk_size=4, **STATES
        ),
        "RWKV": causal("rwkv", "rwkv.blocks", attention_hidden_size=16),
    },
    "transformers: encoders": {
        "BERT": masked("bert", "bert.encoder.layer", unused=True),
        "RoBERTa": masked("roberta", "roberta.encoder.layer", unused=True),
        "DistilBERT": masked(
            "distilbert",
            "distilbert.transformer.layer",
            dim=16,
            n_layers=2,
            n_heads=2,
            hidden_dim=32,
        ),
        "ALBERT": masked(
            "albert", "albert.encoder.albert_layer_groups", embedding_size=8, unused=True
        ),
        "DeBERTa-v2": masked(
            "deberta-v2",
            "deberta.encoder.layer",
            relative_attention=True,
            pos_att_type=["p2c", "c2p"],
            unused=True,
        ),
        "ModernBERT": masked("modernbert", "model.layers"),
    },
    "transformers: encoder and decoder": {
        "T5": seq2seq(
            Seq2Seq,
            "t5",
            "encoder.block decoder.block",
            **{"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2},
        ),
        "BART": seq2seq(
            Seq2Seq, "bart", "model.encoder.layers model.decoder.layers", unused=True, **BART
        ),
        "Whisper": seq2seq(
            Speech,
            "whisper",
            "model.encoder.layers model.decoder.layers",
            sounds,
            None,
            **BART,
            **{"num_mel_bins": 8, "max_source_positions": 20, "max_target_positions": 32},
        ),
    },
    "transformers: images, sounds, both": {
        "ViT (transformers)": of_images(
            partial(of_hub, ForImages, "vit", image_size=16, patch_size=4), "vit.layers", 16
        ),
        "CLIP": Entry(
            clip,
            captioned,
            contrast,
            TOWERS,
            by_sample=False,
            refused=(
                "fsdp_basics",
                "which FSDP does not shard: give a scalar",
                "give `logit_scale` the shape `(1,)`",
            ),
        ),
        "CLIP with a 1-D scale": Entry(clip_1d, captioned, contrast, TOWERS, by_sample=False),
        "wav2vec 2.0": Entry(wav2vec2, waves, classify, "wav2vec2.encoder.layers", unused=True),
    },
}
ZOO = {name: entry for group in GROUPS.values() for name, entry in group.items()}
