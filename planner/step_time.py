"""The seconds of a training step: one function per term.

In the formulas R is the work of a layer in forward passes: 3, and 4 with full checkpointing.
"""

import numpy as np
from network import REACHED, Ring
from pipeline import most_parameters, stage_layers
from shapes import Cluster, Mesh, Model, Number
from stacks import Stack

BF16 = 2  # bytes


def forward_units(mesh: Mesh) -> Number:
    """R: forward, backward (twice a forward), and a second forward with full checkpointing."""
    return 3 + mesh.full_checkpointing


def score_bytes(model: Model, mesh: Mesh) -> Number:
    """Bytes per token and layer of the attention scores: 5 a s. A flash kernel writes none."""
    return np.where(mesh.flash == 1, 0, 5 * model.heads * mesh.sequence) / mesh.tp


def kept_bytes(model: Model, mesh: Mesh) -> Number:
    """Bytes per token and layer that the forward pass keeps for the backward pass, in bf16.

    10 h between the matrices (which TP alone does not divide, SP does), 4 d (a + k) around
    attention, 8 f (SwiGLU) or 4 f in the MLP; 5 a s for the scores without a flash kernel.
    For GPT without flash: 34 h + 5 a s. [Korthikanti et al. 2022, equation 1]
    """
    between = 10 * model.width / np.where(mesh.sequence_parallel == 1, mesh.tp, 1)
    attention = 4 * model.head_dim * (model.heads + model.kv_heads)
    mlp = (4 + 4 * model.gated) * model.ffn
    return between + (attention + mlp) / mesh.tp + score_bytes(model, mesh)


def product_rate(mesh: Mesh, cluster: Cluster, stack: Stack) -> Number:
    """FLOP/s of a TP group in bf16 matrix products."""
    return mesh.tp * stack.gemm_efficiency * cluster.peak_tflops * 1e12


def products_s(model: Model, mesh: Mesh, cluster: Cluster, stack: Stack) -> Number:
    """Matrix products of a layer: 2 FLOP per weight and token, R times.

    [Narayanan et al. 2021, equation 3]
    """
    flop = forward_units(mesh) * mesh.tokens * 2 * model.layer_parameters
    speed = np.where(mesh.fp8 == 1, stack.fp8_speed, 1)
    return flop / product_rate(mesh, cluster, stack) / speed


def attention_s(model: Model, mesh: Mesh, cluster: Cluster, stack: Stack) -> Number:
    """Attention's own products, 4 s a d FLOP per token; a causal flash kernel skips half of them.

    Selective checkpointing computes them a second time. [Narayanan et al. 2021, equation 3; the
    half: Dao 2023; selective: Korthikanti et al. 2022, section 5]
    """
    units = forward_units(mesh) + mesh.selective_checkpointing
    per_token = np.where(mesh.flash == 1, 2, 4) * mesh.sequence * model.heads * model.head_dim
    flop = units * mesh.tokens * per_token * stack.attention_cost
    return flop / product_rate(mesh, cluster, stack)


def traffic_s(model: Model, mesh: Mesh, cluster: Cluster, stack: Stack) -> Number:
    """What the operations between the products read and write: each kept byte, several times."""
    volume = stack.memory_passes * mesh.tokens * kept_bytes(model, mesh)
    return volume * forward_units(mesh) / 3 / (cluster.hbm_gb_s * 1e9)


def tp_ring(model: Model, mesh: Mesh) -> Ring:
    """TP's rings of a layer and micro-batch.

    Two all_reduce forward and two backward are eight rings; SP gathers two inputs again; full
    checkpointing repeats the forward's four. [Shoeybi et al. 2019; Korthikanti et al. 2022]
    """
    count = 8 + 2 * mesh.sequence_parallel + 4 * mesh.full_checkpointing
    return Ring(mesh.tokens * model.width * BF16, mesh.tp, 1, count)


def tp_s(model: Model, mesh: Mesh, cluster: Cluster, stack: Stack) -> Number:
    """The share of TP's rings of a layer that no product hides."""
    return (1 - stack.tp_overlap) * tp_ring(model, mesh).seconds(cluster, stack.hop_s)


def cp_ring(model: Model, mesh: Mesh) -> Ring:
    """CP sends keys and values of a layer around, R times, as messages; their gradients need one
    hop more, to arrive where the keys and values are. All in bf16. [Liu et al. 2023]

    attention_ring.py sends the gradients in fp32; torch's context_parallel sends all heads.
    """
    kv = 2 * model.kv_heads * model.head_dim * BF16
    volume = kv * mesh.sequence * mesh.micro_batch / mesh.tp
    rounds = forward_units(mesh) + 1 / np.maximum(1, mesh.cp - 1)  # of cp - 1 hops each
    return Ring(volume, mesh.cp, mesh.tp, rounds, messages=True)


def cp_s(model: Model, mesh: Mesh, cluster: Cluster, stack: Stack) -> Number:
    """What attention does not hide of CP's ring."""
    hidden = attention_s(model, mesh, cluster, stack)
    return np.maximum(0, cp_ring(model, mesh).seconds(cluster, stack.hop_s) - hidden)


def launch_s(mesh: Mesh, stack: Stack) -> Number:
    """The host's time for a layer: a GPU cannot finish sooner than its work is issued."""
    return stack.launch_s * forward_units(mesh) / 3


def pipelined_launch_s(mesh: Mesh, cluster: Cluster, stack: Stack) -> Number:
    """What the host adds per layer when a pipeline crosses nodes and TP is on.

    Measured for nanotron over EFA only, where it is proportional to tp, and a fifth more for each
    further node that a TP group spans; the cause is not published.
    """
    slow = (mesh.pp > 1) & (mesh.tp > 1) & (mesh.gpus > cluster.gpus_per_node)
    nodes = np.maximum(1, mesh.tp / cluster.gpus_per_node)
    return np.where(slow, stack.pipelined_launch_s * mesh.tp * (0.8 + 0.2 * nodes), 0)


def head_s(model: Model, mesh: Mesh, cluster: Cluster, stack: Stack) -> Number:
    """Output layer and loss: 6 FLOP per weight and token, and what the loss reads and writes."""
    products = 6 * mesh.tokens * model.embedding_parameters / product_rate(mesh, cluster, stack)
    logits = mesh.tokens * model.vocab / mesh.tp
    return products + stack.logit_traffic_bytes * logits / (cluster.hbm_gb_s * 1e9)


def dp_rings(model: Model, mesh: Mesh, stack: Stack) -> list[Ring]:
    """DDP: an all_reduce of the gradients. ZeRO-1 and 2: gradients scattered, weights gathered.

    [Rajbhandari et al. 2020, section 7]
    """
    weights = most_parameters(model, mesh, stack)
    size = mesh.dp_replicate * mesh.dp_shard * mesh.cp
    back = np.where(mesh.zero_stage == 0, stack.gradient_bytes, BF16)
    return [Ring(weights * width, size, mesh.tp) for width in (stack.gradient_bytes, back)]


def dp_s(model: Model, mesh: Mesh, cluster: Cluster, stack: Stack) -> Number:
    """What the backward pass does not hide of them.

    ZeRO-1 pays a latency per layer and hop: it issues about one collective per layer, where DDP's
    few large all_reduce go over trees.
    """
    gradients, weights = dp_rings(model, mesh, stack)
    seconds = gradients.seconds(cluster, 0) + weights.seconds(cluster, 0)
    network = gradients.size > gradients.ranks_per_node(cluster)
    one_per_layer = network & (mesh.zero_stage > 0)
    hops = np.where(one_per_layer, model.layers / mesh.pp * (gradients.size - 1), 0)
    exposed = (1 - stack.dp_overlap) * (seconds + hops * cluster.nic_hop_s)
    return np.where(mesh.zero_stage == 3, 0, exposed)


def fsdp_rings(model: Model, mesh: Mesh, stack: Stack) -> dict[str, Ring]:
    """FSDP's rings of a layer: weights gathered, gradients scattered; and those of the tables.

    Under HSDP the gradients are also reduced between the replicas: once per step, as train.py's
    set_requires_all_reduce(is_last) does (by default fully_shard does it in each micro-batch).
    [Zhao et al. 2023; PyTorch's fully_shard]
    """
    used = np.where(mesh.zero_stage == 3, 1, 0) / mesh.tp
    layer = used * model.layer_parameters
    tables = used * (2 - model.tied) * model.embedding_parameters
    size = mesh.dp_shard * mesh.cp
    stride = mesh.tp
    gradient = stack.gradient_bytes
    return {
        "gather": Ring(layer * BF16, size, stride),
        "scatter": Ring(layer * gradient, size, stride),
        "tables": Ring(tables * (2 * BF16 + gradient), size, stride),
        "replicas": Ring(layer * gradient / size, mesh.dp_replicate, stride * size, 2),
        "replicas' tables": Ring(tables * gradient / size, mesh.dp_replicate, stride * size, 2),
    }


def fsdp_s(model: Model, mesh: Mesh, cluster: Cluster, stack: Stack, layer: Number) -> Number:
    """What the layers of a step do not hide of FSDP's rings; `layer`: seconds of one micro-batch's.

    A layer's weights are gathered while the layer before it computes; the first gather and the
    last scatter have nothing to hide under. The last micro-batch reduces between replicas.
    """
    rings = fsdp_rings(model, mesh, stack)
    time = {name: ring.seconds(cluster, stack.hop_s) for name, ring in rings.items()}
    forward = layer / forward_units(mesh)
    backward = layer - forward
    gather, hide = time["gather"], stack.dp_overlap

    def micro_batch(both: Number, tables: Number) -> Number:
        exposed = np.maximum((1 - hide) * gather, gather - hide * forward)
        exposed = exposed + np.maximum((1 - hide) * both, both - hide * backward)
        return model.layers * exposed + both + tables

    both, tables = gather + time["scatter"], time["tables"]
    last = micro_batch(both + time["replicas"], tables + time["replicas' tables"])
    total = (mesh.accumulation - 1) * micro_batch(both, tables) + last
    return np.where(mesh.zero_stage == 3, total, 0)


def p2p_bytes(model: Model, mesh: Mesh) -> Number:
    """Activations that a stage sends on, per micro-batch, and gradients that it sends back."""
    volume = mesh.tokens * model.width * BF16 / mesh.tp
    return np.where(mesh.pp > 1, 2 * mesh.virtual_stages * volume, 0)


def stages_share_a_node(mesh: Mesh, cluster: Cluster) -> Number:
    """Whether a stage and the next one have at most a node together."""
    return 2 * mesh.gpus / mesh.pp <= cluster.gpus_per_node


def p2p_s(model: Model, mesh: Mesh, cluster: Cluster, stack: Stack) -> Number:
    """Seconds of them, over the port if each stage takes more than half a node.

    Of smaller stages some borders lie between nodes, too; Megatron hides these sends: formulas.md.
    """
    inside = stages_share_a_node(mesh, cluster)
    wire = REACHED * 1e9 * np.where(inside, cluster.nvlink_gb_s, cluster.nic_gb_s)
    hop = np.where(inside, stack.hop_s, cluster.nic_hop_s)
    return p2p_bytes(model, mesh) / wire + np.where(mesh.pp > 1, 6 * mesh.virtual_stages, 0) * hop


def optimizer_s(model: Model, mesh: Mesh, cluster: Cluster, stack: Stack) -> Number:
    """Adam reads and writes 30 bytes per weight that a rank updates."""
    weights = most_parameters(model, mesh, stack)
    shards = np.where(mesh.zero_stage > 0, mesh.shards, 1)
    return 30 * weights / shards / (cluster.hbm_gb_s * 1e9)


def bubble(pp: Number, virtual_stages: Number) -> Number:
    """Micro-batches of a mean stage that a rank waits in a step, while the pipeline fills and
    drains. [Narayanan et al. 2021, section 2.2]
    """
    return (pp - 1) / virtual_stages


def bubble_fraction(pp: Number, micro_batches: Number, virtual_stages: Number = 1) -> Number:
    """Share of a step that a rank waits, if all stages take equally long."""
    waiting = bubble(pp, virtual_stages)
    return waiting / (micro_batches + waiting)


def step_parts(model: Model, mesh: Mesh, cluster: Cluster, stack: Stack) -> dict[str, Number]:
    """Seconds of a step by what takes them; their sum is the step.

    A step is m micro-batches of the slowest stage, then the bubble.
    """
    given = (model, mesh, cluster, stack)
    parts = {
        "compute": products_s(*given) + attention_s(*given),
        "traffic": traffic_s(*given),
        "TP": tp_s(*given),
        "CP": cp_s(*given),
    }
    busy = sum(parts.values())
    host = launch_s(mesh, stack)
    layer = np.maximum(busy, host)
    pipelined = pipelined_launch_s(mesh, cluster, stack)
    steady = np.where(pipelined > 0, np.maximum(layer, host + pipelined + parts["TP"]), layer)
    head = head_s(*given)

    first, between, last = stage_layers(model, mesh, stack)
    full = np.maximum(first, between)
    head_is_slowest = last * layer + head > full * layer
    layers = np.where(mesh.pp == 1, model.layers, np.where(head_is_slowest, last, full))
    has_head = np.where((mesh.pp == 1) | head_is_slowest, 1, 0)
    mean = (model.layers * layer + head) / mesh.pp

    m = mesh.accumulation
    step = {name: m * layers * seconds for name, seconds in parts.items()}
    step["compute"] = step["compute"] + m * has_head * head
    step["launch"] = m * layers * (steady - busy)
    step["DP"] = fsdp_s(*given, layer) + dp_s(*given)
    step["bubble"] = bubble(mesh.pp, mesh.virtual_stages) * mean
    step["p2p"] = m * p2p_s(*given)
    step["optimizer"] = optimizer_s(*given) + stack.fixed_s
    return step


def step_s(model: Model, mesh: Mesh, cluster: Cluster, stack: Stack) -> Number:
    """Seconds of a step."""
    return sum(step_parts(model, mesh, cluster, stack).values())


def model_flop(model: Model, mesh: Mesh) -> Number:
    """FLOP of a step for MFU, all GPUs together: 6 per weight and token, 12 L s a d for attention.

    Embedding lookups are free, recomputation does not count, attention counts in full, causal or
    not. [Chowdhery et al. 2022 (PaLM), appendix B]
    """
    weights = model.layers * model.layer_parameters + model.embedding_parameters
    attention = 12 * model.layers * model.heads * model.head_dim * mesh.sequence
    return mesh.step_tokens * (6 * weights + attention)
