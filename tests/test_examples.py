"""examples/: a model of your own by one file: only task.py is replaced, as the READMEs say."""

import json
import re
import shutil

import pool
import pytest
from helpers import ROOT, read_metrics

LINE = re.compile(r"^test loss ([\d.]+)   test accuracy ([\d.]+)   of (\d+) samples$", re.M)


@pytest.fixture
def project(tmp_path):
    def make(directory: str, example: str):
        """`cp -r directory my_project`, then `cp examples/EXAMPLE.py task.py`."""
        folder = tmp_path / "my_project"
        shutil.copytree(ROOT / directory, folder, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(folder / "examples" / f"{example}.py", folder / "task.py")
        return folder / "train.py"

    return make


@pytest.mark.slow
def test_resnet_with_ddp(project, tmp_path):
    script = project("ddp_basics", "resnet18")
    flags = ("--images=64", "--epochs=2", "--batch-size=16", "--device=cpu", "--log-every=1")
    runs = tmp_path / "runs"
    found = LINE.search(pool.run(script, *flags, "--output-dir", runs, ranks=2).check().output)
    assert found[3] == "16"
    lines = [line for line in read_metrics(runs) if "loss" in line]
    assert [line["step"] for line in lines] == list(range(1, 9))
    # Augmented images are the same for one process, and BatchNorm's batches are not.
    alone = pool.run(script, *flags, "--epochs=1", "--output-dir", tmp_path / "alone").check()
    assert LINE.search(alone.output)
    first = next(line for line in read_metrics(tmp_path / "alone") if "loss" in line)
    assert first["loss"] == pytest.approx(lines[0]["loss"], rel=0.2)


@pytest.mark.release
def test_llama_with_fsdp(project, tmp_path):
    """New, on two ranks as on one; then continued by --model from a local directory."""
    from transformers import ByT5Tokenizer, LlamaConfig, LlamaForCausalLM

    script = project("fsdp_basics", "llama")
    flags = ("--length=512", "--epochs=1", "--batch-size=32", "--device=cpu", "--log-every=1")
    losses = {}
    for ranks in (1, 2):
        output = tmp_path / f"{ranks}"
        assert LINE.search(
            pool.run(script, *flags, "--output-dir", output, ranks=ranks).check().output
        )
        losses[ranks] = [line["loss"] for line in read_metrics(output) if "loss" in line]
    # A rotary table of garbage would show in the first loss; sums in another order: seen 1e-6.
    assert losses[2] == pytest.approx(losses[1], abs=1e-4)
    assert losses[1][-1] < losses[1][0] - 1

    model = tmp_path / "model"
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True}
    LlamaForCausalLM(LlamaConfig(vocab_size=384, **sizes, **heads)).save_pretrained(model)
    ByT5Tokenizer().save_pretrained(model)
    assert json.loads((model / "config.json").read_text())["tie_word_embeddings"]
    result = pool.run(script, *flags, "--model", model, ranks=2).check()
    assert LINE.search(result.output)
