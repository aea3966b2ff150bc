"""What plan.py reads: models of Hugging Face, files of GPUs, numbers. Mistakes are one sentence."""

import json

import calibrate
import inputs
import pytest
from helpers import ROOT, python
from inputs import UserError

PLAN = ROOT / "planner/plan.py"
COUNT = """
import json, torch
from transformers import AutoConfig, AutoModelForCausalLM
for family in {families}:
    sizes = {{"num_key_value_heads": 8}} if family == "nemotron" else {{}}
    config = AutoConfig.for_model(family, **sizes)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    weights = sum(p.numel() for p in model.parameters())
    print(json.dumps([config.to_diff_dict() | {{"model_type": family}}, weights], default=str))
"""


@pytest.mark.slow
def test_weights_of_each_family_are_those_of_transformers(tmp_path):
    """Norms, biases and learned positions are left out: 1.5 % of the smallest models."""
    families = list(inputs.GATED | inputs.PLAIN)
    script = tmp_path / "count.py"
    script.write_text(COUNT.format(families=families))
    output = python(script, cold=True).check().output
    found = [json.loads(line) for line in output.splitlines() if line.startswith("[{")]
    assert [config["model_type"] for config, _ in found] == families
    for config, weights in found:
        ours = inputs.from_hugging_face(config)
        assert ours.parameters == pytest.approx(weights, rel=0.015), config["model_type"]
        del config["tie_word_embeddings"]  # its default is the family's
        assert inputs.from_hugging_face(config).tied == ours.tied, config["model_type"]


GPT = {"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "vocab_size": 50257}
FALCON = {"model_type": "falcon", "hidden_size": 4544, "num_hidden_layers": 32, "vocab_size": 65024}
FALCON |= {"num_attention_heads": 71, "multi_query": True, "new_decoder_architecture": False}
LARGER = FALCON | {"hidden_size": 8192, "num_hidden_layers": 60, "num_attention_heads": 128}
LARGER |= {"new_decoder_architecture": True, "num_kv_heads": 8}
PHI = {"model_type": "phi", "hidden_size": 2560, "num_hidden_layers": 32, "vocab_size": 51200}
PHI |= {"num_attention_heads": 32, "intermediate_size": 10240}
STARCODER = {"model_type": "gpt_bigcode", "n_embd": 6144, "n_layer": 40, "n_head": 48}
STARCODER |= {"n_inner": 24576, "vocab_size": 49152, "multi_query": True}


@pytest.mark.parametrize(
    ("config", "billions"),
    [(FALCON, 6.92), (LARGER, 41.3), (PHI, 2.78), (STARCODER, 15.5), (GPT, 0.124)],
)
def test_weights_of_published_models(config, billions):
    """The sizes of their model cards: 7B, 40B, 2.7B, 15.5B, 124M."""
    assert inputs.from_hugging_face(config).parameters / 1e9 == pytest.approx(billions, rel=0.01)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"model_type": "bert"}, "its model_type is 'bert', not one of: llama, "),
        ({"model_type": None}, "its model_type is None"),
        ({"model_type": ["gpt2"]}, "its model_type is"),
        ({"moe_num_experts": 64}, "it has experts"),
        ({"ffn_config": {"moe_num_experts": 16}}, "it has experts"),
        ({"num_key_value_heads": 5}, "5 heads of keys do not divide its 12 heads"),
        ({"n_head": 0}, "heads is 0"),
        ({"n_head": 7}, "7 heads do not divide its width 768"),
        ({"n_layer": 10**400}, "layers is 1000"),
        ({"n_layer": True}, "layers is True"),
        ({"n_embd": 10**30}, "width is 1000"),
        ({"n_embd": "768"}, "width is '768'"),
        ({"tie_word_embeddings": 7}, "tie_word_embeddings is 7"),
    ],
)
def test_a_config_that_the_formulas_do_not_know(tmp_path, change, says):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(GPT | change))
    with pytest.raises(UserError) as error:
        inputs.model(str(path))
    assert says in str(error.value)
    assert len(str(error.value).splitlines()) == 1


@pytest.mark.parametrize("text", ["[1, 2]", '"x"', "3", "null"])
def test_a_config_that_is_no_table(tmp_path, text):
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(UserError, match="it is no table of keys"):
        inputs.model(str(path))


def machine(tmp_path, **changes) -> str:
    """A file of a GPU; None leaves a key out."""
    table = {"gpu_memory_gb": "80", "peak_tflops": "989", "hbm_gb_s": "3350", "nvlink_gb_s": "450"}
    table |= {"nic_gb_s": "50", "gpus_per_node": "8"} | changes
    path = tmp_path / "machine.toml"
    constants = table.pop("constants", None)
    lines = [f"{key} = {value}" for key, value in table.items() if value is not None]
    path.write_text("\n".join([*lines, *(["[constants]", constants] if constants else [])]))
    return str(path)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"gpu_memory_gb": "nan"}, "gpu_memory_gb is nan, no number above 0"),
        ({"gpu_memory_gb": "inf"}, "gpu_memory_gb is inf, no number above 0"),
        ({"nvlink_gb_s": "inf"}, "nvlink_gb_s is inf, no number above 0"),
        ({"gpu_memory_gb": "true"}, "gpu_memory_gb is True, no number above 0"),
        ({"peak_tflops": "-1"}, "peak_tflops is -1, no number above 0"),
        ({"gpus_per_node": "0.5"}, "gpus_per_node is 0.5, not whole"),
        ({"stack": '["a"]'}, "stack is ['a'], not the name of one"),
        ({"constants": 'gemm_efficiency = "fast"'}, "constants: gemm_efficiency is 'fast', no"),
        ({"constants": "gemm_efficiency = 0"}, "constants: an efficiency or a speed is 0"),
        ({"constants": "launch_s = -0.5"}, "constants: launch_s is -0.5, no number of 0 or more"),
        ({"constants": "speed = 2"}, "presets.toml shows the keys"),
    ],
)
def test_a_cluster_with_a_mistake(tmp_path, changes, says):
    with pytest.raises(UserError) as error:
        inputs.cluster(machine(tmp_path, **changes))
    assert says in str(error.value)


@pytest.mark.parametrize("text", ["9" * 400, "1e5", "-1", "0", "1.5", "G"])
def test_a_count_that_is_none(text):
    with pytest.raises(UserError):
        inputs.count(text)


# Links that were not measured, and fp8.


@pytest.mark.parametrize(
    ("missing", "gpus", "key"),
    [(("nvlink_gb_s", "nic_gb_s"), 2, "nvlink_gb_s"), (("nic_gb_s",), 9, "nic_gb_s")],
)
def test_a_link_that_was_not_measured_is_not_guessed(tmp_path, missing, gpus, key):
    path = machine(tmp_path, **dict.fromkeys(missing))
    cluster, *_ = inputs.cluster(path)
    inputs.links(cluster, gpus - 1, path)
    with pytest.raises(UserError, match=f"has no {key}, which more than {gpus - 1} GPUs need"):
        inputs.links(cluster, gpus, path)


def test_calibration_writes_the_links_that_its_ring_used(monkeypatch):
    """A ring in this node, and one over two nodes of four, whose four ports carry it together."""
    keys = ("gpu_memory_gb", "peak_tflops", "hbm_gb_s", "activation_factor", "memory_passes")
    found = dict.fromkeys((*keys, "launch_s", "hop_s", "base_gib"), 1.0)
    assert "_gb_s" not in calibrate.as_toml(found).replace("hbm_gb_s", "")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    monkeypatch.setattr(calibrate.dist, "new_subgroups", lambda here: (f"{here} ranks", None))

    def reached(ranks: int, seconds: float) -> float:
        return 2 * (ranks - 1) / ranks * (calibrate.LARGE - calibrate.SMALL) / seconds / 0.8e9

    for ranks in (4, 8):
        seconds, groups = iter((0.001, 0.101, 0.01, 0.51)), []

        def median(call, *_, times=seconds, groups=groups):
            groups.append(call.keywords["group"])
            return next(times)

        monkeypatch.setattr(calibrate, "median_seconds", median)
        links = calibrate.links(calibrate.CPU, 1.0, ranks)
        assert links["nvlink_gb_s"] == pytest.approx(reached(4, 0.1))
        assert ("nic_gb_s" in links) == (ranks == 8)
        assert groups == ([None] * 2 if ranks == 4 else ["4 ranks"] * 2 + [None] * 2)
    assert links["nic_gb_s"] == pytest.approx(reached(8, 0.5) / 4)
    assert links["nic_hop_s"] > links["hop_s"] > 0
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")  # one rank a node: no link inside of it
    seconds = iter((0.01, 0.51))
    monkeypatch.setattr(calibrate, "median_seconds", lambda *_: next(seconds))
    assert calibrate.links(calibrate.CPU, 1.0, 2).keys() == {"nic_gb_s", "nic_hop_s"}


def test_fp8_needs_a_gpu_that_has_it():
    job = ("--model", "llama-3-8b", "--gpus", 64, "--fp8")
    for gpu in ("A100", "A100-40GB", "laptop"):
        result = python(PLAN, *job, "--gpu", gpu)
        assert result.returncode == 2
        assert f"--fp8: {gpu} has no fp8" in result.output
    said = python(PLAN, *job, "--stack", "megatron-h100").check().output
    assert "not validated for: fp8 (no row with this software)" in said
    assert "fp8 (no row" not in python(PLAN, *job).check().output


# Large numbers, and files of runs.


@pytest.mark.parametrize(
    ("gpus", "says"),
    [(99_991, "the nearest number of GPUs that works is 98304"), (10**12, "is above 100,000")],
)
def test_many_gpus_get_an_answer(gpus, says):
    result = python(PLAN, "--model", "llama-3-8b", "--gpus", gpus)
    assert result.returncode == 2
    assert says in result.output


@pytest.mark.parametrize("mesh", ["\u00b2", "9" * 5000])
def test_a_line_that_is_no_number(mesh):
    result = python(PLAN, "--model", "llama-3-8b", "--gpus", 64, "--explain", mesh)
    assert result.returncode == 2
    assert "is not KEY=NUMBER" in result.output


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (None, "No such file"),
        ("a,b\n1,2\n", "width is not a number"),
        ("", "no measured row for nanotron-h100"),
    ],
)
def test_runs_that_cannot_be_fitted(tmp_path, text, says):
    path = tmp_path / "rows.csv"
    if text is not None:
        path.write_text(text)
    result = python(ROOT / "planner/fit.py", "--rows", path)
    assert result.returncode == 2
    assert result.output.startswith(f"{path} cannot be fitted: ")
    assert says in result.output
    assert "Traceback" not in result.output
