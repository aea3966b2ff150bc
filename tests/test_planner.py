"""The planner's command lines, its score, its constants, and what its README says."""

import csv
import dataclasses
import importlib.util
import itertools
import json
import re
import tomllib
from collections import Counter

import calibrate
import command
import inputs
import numpy as np
import pool
import pytest
import report
import shapes
import stacks
import step_time
from fit import as_toml
from fitting import FITS, Fit, fit_all, fitted
from helpers import ROOT, python
from published import PUBLISHED, UnreadableRow, measured, parse, read, stacked
from score import PICKS, cross_validated, predict, regret, time_errors, usable
from search import Job, evaluate, meshes
from stacks import FILE, choose, load

PLAN, SCORE = ROOT / "planner/plan.py", ROOT / "planner/score.py"
PAGES = ("README.md", "formulas.md", "recipes.md")
README = "\n".join((ROOT / "planner" / page).read_text() for page in PAGES)
JOB = ("--model", "llama-3-8b", "--gpus", 64)
ROWS = read(PUBLISHED)


def plan(*args) -> str:
    return python(PLAN, *args).check().output


def printed(output: str) -> str:
    """As an indented block of the README."""
    return "\n".join(f"    {line}".rstrip() for line in output.rstrip().splitlines())


# plan.py.


def test_the_readme_shows_real_output():
    command = re.search(r"^    \$ python planner/plan.py (.*)$", README, re.MULTILINE)[1]
    assert printed(plan(*command.split())) in README


def test_the_first_screen_shows_two_lines_of_it():
    page, full = ((ROOT / "planner" / name).read_text() for name in ("README.md", "recipes.md"))
    (lines,) = re.findall(r"^```text\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    assert len(lines.splitlines()) == 2
    assert [line for line in lines.splitlines() if f" {line}\n" not in full] == []


def test_ten_meshes_that_fit_the_fastest_first():
    output = plan(*JOB)
    seconds = [float(x) for x in re.findall(r"= *([\d.]+) +\d+ +\d+%  ", output)]
    assert len(seconds) == 10
    assert seconds == sorted(seconds)
    assert "does not fit" not in output
    assert output.count("dp=") == 10


def test_parts_sum_to_the_total():
    for line in plan(*JOB).splitlines():
        if found := re.match(r" ?\d+  ((?: +\d+\.\d{3}){9})  = *([\d.]+)", line):
            parts = [float(x) for x in found[1].split()]
            assert sum(parts) == pytest.approx(float(found[2]), abs=0.006)


def test_a_job_that_does_not_fit():
    output = python(PLAN, "--model", "llama-3.1-405b", "--gpus", 8, "--batch-tokens", "64K").output
    assert "does not fit" in output
    assert "No mesh fits" in output


@pytest.mark.parametrize("mesh", ["1", "dp=8x8,micro=1,checkpoint=1", "dp=4,tp=8,pp=2,v=1"])
def test_explain_derives_the_numbers_of_the_table(mesh):
    output = plan(*JOB, "--explain", mesh)
    held = [float(x) for x in re.findall(r"= ([\d.]+) GiB$", output, re.MULTILINE)]
    logits = float(re.search(r"on this GPU: ([\d.]+) GiB", output)[1])
    total = float(re.search(r"total +([\d.]+) GiB", output)[1])
    assert sum(held) + logits == pytest.approx(total, abs=0.05)
    assert re.search(r"MFU [\d.]+ %", output)
    if "checkpoint" in mesh:
        assert "4 x 2 FLOP" in output


def test_selective_checkpointing_is_one_of_the_plans():
    """Megatron-530B as in 2022, without a flash kernel: the scores alone are computed again."""
    job = RECIPES["Megatron-530B"][0].split()
    lines = plan(*job).splitlines()
    assert any(re.match(r" ?\d+  dp=\S+ +\S+ z\d.* sel ", line) for line in lines)
    output = plan(*job, "--explain", "dp=8,tp=8,pp=35,micro=1,v=1,selective=1")
    held = re.search(r"activations  3 layers x 35 .*\(([\d,]+) - ([\d,]+) of scores\)", output)
    kept, scores = (int(n.replace(",", "")) for n in held.groups())
    h, a, s = 20480, 128, 2048  # Korthikanti et al. 2022, equation 4: (34 + 5 a s / h) s b h / t
    assert (kept, scores) == (h * (34 + 5 * a * s // h) // 8, 5 * a * s // 8)
    gib = float(re.search(r"activations .* = ([\d.]+) GiB", output)[1])
    assert gib == pytest.approx((3 * 35 * (kept - scores) + scores) * s / 2**30, abs=0.01)
    assert "  attention    4 x 4 s a d" in output
    assert "  products     3 x 2 FLOP" in output
    titan = plan(*JOB, "--stack", "torchtitan-h100", "--explain", "dp=1x64,selective=1")
    saved = 10 * 4096 + 4 * 128 * (32 + 8) + 8 * 14336  # with a flash kernel; torchtitan keeps 45 %
    assert re.search(rf" 0.45 x [\d.]+ x {saved:,} bytes \(selective checkpointing\) = ", titan)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("args", "says"),
    [
        (("--model", "llama-3-8c", "--gpus", 8), "nor one of: llama-3-8b, "),
        ((*JOB, "--gpu", "H1000"), "nor one of: H100, "),
        ((*JOB, "--stack", "nemo"), "is not one of: nemo-h100, "),
        (("--model", "llama-3-8b", "--gpus", 37), "the nearest number of GPUs that works is 36"),
        (("--model", "llama-3-8b", "--gpus", "many"), "not a whole number above 0"),
        ((*JOB, "--batch-tokens", "4X"), "write 4096, 64K or 4M"),
        ((*JOB, "--sequence", 7000), "the nearest that works is 4193000"),
        ((*JOB, "--explain", "dp=8,tp=16"), "a mesh of 128 GPUs, not of 64: the nearest"),
        ((*JOB, "--explain", "dp=4,tp=16"), "no such mesh splits 512 sequences, 32 heads"),
        ((*JOB, "--explain", "size=2"), "is not KEY=NUMBER with one of: dp, tp, pp, cp"),
        ((*JOB, "--explain", "dp=1x16,pp=4"), "whole during a step, as ZeRO-1 does"),
        (
            (*JOB, "--explain", "dp=8x8,selective=1"),
            "with a flash kernel selective=1 saves nothing",
        ),
        ((*JOB, "--explain", "11"), "the table has the lines 1 to 10"),
        ((*JOB, "--plot", "/nowhere/a.png"), "cannot be written"),
        ((*JOB, "--plot", "a.docx"), "is not supported"),
        (("--gpus", 8), "required: --model"),
    ],
)
def test_a_mistake_is_one_sentence(args, says):
    result = python(PLAN, *args)
    assert result.returncode == 2
    last = result.output.splitlines()[-1]
    assert last.startswith("plan.py: error: ")
    assert says in last
    assert "Traceback" not in result.output


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{}", "its model_type is None, not one of: llama, "),
        ('{"model_type": "llama"}', "it lacks hidden_size"),
        ("no JSON", "is no config.json of a decoder"),
        ('{"num_local_experts": 8}', "it has experts"),
        ('{"hidden_size": 0, "num_attention_heads": 1}', "is no config.json"),
    ],
)
def test_a_config_that_is_no_decoder(tmp_path, text, says):
    (tmp_path / "config.json").write_text(text)
    result = python(PLAN, "--model", tmp_path, "--gpus", 8)
    assert result.returncode == 2
    assert says in result.output
    assert "Traceback" not in result.output


def test_a_hugging_face_config(tmp_path):
    llama = {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32}
    llama |= {"num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 128256}
    llama |= {"tie_word_embeddings": False, "model_type": "llama"}
    (tmp_path / "config.json").write_text(json.dumps(llama))
    given = ("--gpus", 64, "--model")
    assert plan(*given, tmp_path).splitlines()[1:] == plan(*given, "llama-3-8b").splitlines()[1:]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("peak_tflops = ", "cannot be read"),
        ("peak_tflops = 1", "missing 3 required"),
        ("stack = 'generic'\nspeed = 1", "presets.toml shows the keys"),
    ],
)
def test_a_cluster_file_with_a_mistake(tmp_path, text, says):
    path = tmp_path / "mine.toml"
    path.write_text(text)
    result = python(PLAN, *JOB, "--gpu", path)
    assert result.returncode == 2
    assert says in result.output


@pytest.mark.slow
@pytest.mark.parametrize(
    ("args", "doubt"),
    [
        (("--gpu", "H200"), "H200 (the rows ran on H100"),
        (("--gpu", "4090", "--sequence", 2048), "generic (no rows"),
        (("--explain", "dp=1x64"), "ZeRO stage 3 with this software"),
        (("--sequence", 131072, "--explain", "dp=4,tp=8,cp=2"), "beyond 64k tokens"),
        (("--sequence", 131072, "--explain", "dp=2,tp=8,cp=4"), "cp = 4 (the rows end at 2)"),
    ],
)
def test_what_no_row_backs_is_said(args, doubt):
    lines = plan(*JOB, *args).splitlines()
    assert any(line.startswith("not validated for: ") and doubt in line for line in lines)


def test_odd_heads_are_a_doubt(tmp_path):
    odd = {"hidden_size": 1200, "num_hidden_layers": 8, "num_attention_heads": 12}
    odd |= {"vocab_size": 50304, "model_type": "llama"}
    (tmp_path / "config.json").write_text(json.dumps(odd))
    output = plan("--model", tmp_path, "--gpus", 8, "--sequence", 1024, "--batch-tokens", "64K")
    assert "not validated for: head_dim 100 (no multiple of 8: attention is far slower)" in output


@pytest.mark.slow
def test_a_plot(tmp_path):
    path = tmp_path / "plan.png"
    assert f"{path} shows the plans" in plan(*JOB, "--plot", path)
    assert path.read_bytes().startswith(b"\x89PNG")
    plan(*JOB, "--explain", "1", "--plot", path)  # one bar, one node
    one = ("--model", "gpt-124m", "--gpus", 1, "--sequence", 1024, "--batch-tokens", "64K")
    plan(*one, "--plot", path)  # no wire is busy


def test_the_node_diagram_has_the_bytes_of_each_wire():
    """Counted by hand: what a rank sends, times the parts of `wires`, which is tested elsewhere.

    HSDP with TP: groups of 2 ranks (TP), of 4 neighbouring pairs (a node's shards), of 8 nodes.
    """
    import drawing
    import inputs
    import matplotlib.pyplot as plt
    from network import wires
    from search import Job, evaluate, meshes

    model, cluster = inputs.model("llama-3-8b"), inputs.cluster("H100")[0]
    job = Job(model, cluster, load()["nemo-h100"][0], 64, 8192, 512)
    sizes = {"dp_replicate": 8, "dp_shard": 4, "tp": 2}
    wanted = sizes | {"micro_batch": 2, "zero_stage": 3, "full_checkpointing": 0}
    (hybrid,) = [m for m in meshes(job) if all(getattr(m, k) == v for k, v in wanted.items())]
    layer, tables, micro_batches, tokens = 218_103_808 / 2, 2 * 128256 * 4096 / 2, 8, 2 * 8192
    fsdp = micro_batches * (32 * layer * (2 + 2 + 4) + tables * (2 + 2 + 4)) * 3 / 4
    sent = {
        "TP": ("tp", micro_batches * 32 * 10 * tokens * 4096 * 2 / 2),
        "FSDP": ("dp_shard", fsdp),
        "DP": ("dp_replicate", 2 * 4 * (32 * layer + tables) / 4 * 7 / 8),  # once per step
    }
    parts = wires(sizes, 8)
    words, totals = ([], []), [0, 0]
    for name, (axis, nbytes) in sent.items():
        for side in (0, 1):
            if gb := nbytes * parts[axis][side] / 1e9:
                words[side].append(f"{gb:,.3g} {name}")
                totals[side] += gb
    figure = plt.figure()
    drawing.nodes(figure, job, evaluate(job, [hybrid]))
    texts = [text.get_text() for ax in figure.axes for text in ax.texts]
    assert f"links in the node: {totals[0]:,.3g} = {' + '.join(words[0])}" in texts
    assert f"network port: {words[1][0]}" in texts
    assert texts.count("NIC") == 8
    widths = {line.get_color(): line.get_linewidth() - 0.5 for line in figure.axes[0].lines}
    busy = [totals[0] / 450, totals[1] / 50]
    assert len(figure.axes[0].lines) == 16
    assert widths[drawing.COLOURS[0]] / widths[drawing.COLOURS[4]] == pytest.approx(
        busy[0] / busy[1]
    )
    plt.close(figure)


@pytest.mark.slow
@pytest.mark.parametrize(("axis", "sequence"), [("tp", 32), ("cp", 16384)])
def test_the_flags_of_a_plan_run(tmp_path, axis, sequence):
    job = ("--model", "gpt-template", "--gpu", "laptop", "--gpus", 2, "--sequence", sequence)
    output = plan(*job, "--batch-tokens", 16 * sequence, "--explain", f"{axis}=2", "--flags")
    flags = output.splitlines()[-1].partition("train.py ")[2].split()
    assert flags[flags.index(f"--{axis}") :][:2] == [f"--{axis}", "2"]
    flags[flags.index("--block-size") + 1] = "32"  # attention to 16,384 tokens takes too long here
    script = ROOT / "transformer_basics/train.py"
    done = pool.run(script, *flags, "--steps", 2, "--sample", 0, ranks=2, cwd=tmp_path)
    done.check()


# score.py and the rows.


@pytest.mark.slow
def test_the_readme_has_the_score():
    for flags in (["--leave-out", "model"], ["--leave-out", "fifth"], ["--one-node"]):
        assert printed(python(SCORE, *flags).check().output) in README


def test_a_random_fifth_is_left_out():
    """Each run once, and never among the runs that set its constants."""
    rows = [row for row in ROWS if row["family"] == "simumaxB200"]
    scored = cross_validated(rows, "fifth")
    assert sorted(s.row["row_id"] for s in scored) == sorted(row["row_id"] for row in rows)
    parts = {s.row["row_id"]: s.row["fifth"] for s in scored}
    assert sorted(Counter(parts.values()).values()) == [2, 2, 2, 3, 3]
    one = scored[0]
    rest = [row for row in rows if parts[row["row_id"]] != one.row["fifth"]]
    assert 12 - len(rest) in (2, 3)
    (again,) = predict([one.row], fitted(FITS["megatron-b200"], rest))
    assert again.time_s == one.time_s


def test_json_says_what_the_table_says():
    families = json.loads(python(SCORE, "--json").check().output)["families"]
    assert families.keys() == {row["family"] for row in ROWS}
    playbook = families["playbook"]
    assert playbook["rows"] == 1736
    assert playbook["fault_rows"] == 189
    assert playbook["memory"]["median"] < 9
    assert playbook["memory"]["p90"] < 24
    assert playbook["fits_accuracy"] > 0.93
    assert playbook["time"]["median"] < 7
    assert families["mosaic"]["time"]["skill"] > 0.7


def test_rows_that_lack_something(tmp_path):
    """Other columns may be missing, empty or wrong; the rest of the file is scored."""
    rows = [dict(row) for row in ROWS[:40]]
    rows[0]["layers"], rows[1]["width"], rows[2]["sequence"] = "", "wide", "0"
    rows[3]["accumulation"] = "inf"
    for row in rows[4:12]:
        row |= {"software": "new", "family": "unknown", "gpu": "GB300", "dtype": ""}
        row |= {"hbm_gb_s": "nan", "gpus_per_node": "0", "kv_heads": "", "memory_gib": "-1"}
    path = tmp_path / "rows.csv"
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0].keys())
        writer.writeheader()
        writer.writerows(rows)
    result = python(SCORE, path).check()
    assert "Warning" not in result.output
    assert "1 rows left out: layers is not a number" in result.output
    assert "1 rows left out: sequence is 0" in result.output
    found = json.loads(python(SCORE, path, "--json").check().output)
    assert found["families"]["unknown"]["rows"] == 8
    assert sum(found["left_out"].values()) == 4


@pytest.mark.parametrize("text", ["", "a,b\n1,2\n", "layers\n3\n"])
def test_a_file_without_rows(tmp_path, text):
    path = tmp_path / "rows.csv"
    path.write_text(text)
    assert "Traceback" not in python(SCORE, path).check().output


def test_a_file_that_is_not_there():
    result = python(SCORE, "/nowhere/rows.csv")
    assert result.returncode == 2
    assert result.output.startswith("/nowhere/rows.csv cannot be read")


def test_every_published_row_is_readable():
    assert usable(ROWS) == (ROWS, {})
    assert len(ROWS) == 3660
    named = {row["family"] for row in ROWS}
    sources = {row["family"] for row in read(PUBLISHED.with_name("sources.csv"))}
    assert named <= sources


def test_a_row():
    model, mesh, cluster = parse(ROWS[0])
    assert model.parameters == 8_029_995_008
    assert (mesh.dp_shard, mesh.zero_stage, mesh.selective_checkpointing) == (8, 3, True)
    assert mesh.gpus == 8
    assert cluster.peak_tflops == 989
    assert measured(ROWS[0], "step_time_s") == 2.8435
    with pytest.raises(UnreadableRow, match="width is not a number"):
        parse(ROWS[0] | {"width": "x"})


def scored_job(seconds: list[float], predicted: list[float]) -> list:
    """A job with one mesh per entry: dp = 1, 2, 4, ..."""
    from score import Scored

    row = {"model": "m", "n_gpus": "8", "micro_batch_sequences": "1", "outcome": "ok"}
    return [
        Scored(row | {"dp_replicate": str(2**i), "step_time_s": str(s)}, p, 1.0, True, 1.0)
        for i, (s, p) in enumerate(zip(seconds, predicted, strict=True))
    ]


def test_regret():
    found = regret(scored_job([1.0, 1.5, 2.0], [9.0, 8.0, 10.0]))
    assert found["planner"]["mean"] == pytest.approx(50)
    assert found["dp first"]["mean"] == pytest.approx(100)
    assert regret(scored_job([1.0, 2.0], [1.0, 2.0])) is None  # two meshes are no choice


def test_regret_does_not_depend_on_the_order_of_the_rows():
    """The file sorts each job by measured time: the first of equal predictions is the best."""
    rows = [row for row in ROWS if row["family"] == "playbook" and row["fault_suspect"] != "1"]
    runs = predict(rows, load()["nanotron-h100"][0])
    means = []
    for order in (
        runs,
        runs[::-1],
        [runs[i] for i in np.random.default_rng(0).permutation(len(runs))],
    ):
        found = regret(order)
        means.append([found[pick]["mean"] for pick in PICKS])
    assert means[0] == pytest.approx(means[1])
    assert means[0] == pytest.approx(means[2])


def test_equal_predictions_cost_their_mean():
    tied = regret(scored_job([1.0, 1.5, 2.0], [9.0, 9.0, 10.0]))
    assert tied["planner"]["mean"] == pytest.approx(25)
    less_memory = scored_job([1.0, 1.5, 2.0], [9.0, 9.0, 10.0])
    less_memory[1].memory_gib = 0.5
    assert regret(less_memory)["planner"]["mean"] == pytest.approx(50)


# Constants.


@pytest.mark.slow
def test_the_constants_are_those_that_fit_sets():
    assert FILE.read_text() == as_toml(fit_all(ROWS), ROWS)


def test_at_most_six_constants_of_time():
    assert max(len(fit.time) for fit in FITS.values()) == 6
    for _, rest in load().values():
        assert len(rest.get("fitted", ())) <= 8  # with those of memory


def test_a_fit_finds_the_constants_that_made_the_rows():
    known = {"launch_s": 0.001, "fixed_s": 0.02, "hop_s": 1e-5}
    fit = Fit(("x",), (), ("A100",), ("gemm_efficiency", "memory_passes"), known)
    rows = [row | {"family": "x"} for row in ROWS if row["family"] == "vtrain_multi"]
    from step_time import step_s

    truth = fitted(Fit((), (), (), (), known | {"gemm_efficiency": 0.5, "memory_passes": 12}), [])
    seconds = step_s(*stacked(rows), truth)
    for row, value in zip(rows, seconds, strict=True):
        row["step_time_s"] = repr(float(value))
    found = fitted(fit, rows)
    assert found.gemm_efficiency == pytest.approx(0.5, rel=0.01)
    assert found.memory_passes == pytest.approx(12, rel=0.02)


def test_faults_and_empty_rows_set_nothing():
    rows = [dict(row) for row in ROWS if row["family"] == "mtnlg"]
    wrong = [row | {"step_time_s": "1e6", "fault_suspect": "1"} for row in rows]
    assert fitted(FITS["mt-nlg-a100"], rows) == fitted(FITS["mt-nlg-a100"], rows + wrong)


@pytest.mark.parametrize(
    ("family", "software", "gpu", "stack"),
    [
        ("mosaic", "llm-foundry fsdp1", "A100-40GB", "mosaic-a100-40gb"),
        ("bloom", "megatron-deepspeed", "A100", "bloom-a100"),
        ("torchtitanH200", "torchtitan", "H200", "torchtitan-h100"),
        ("later", "megatron-lm", "B200", "megatron-b200"),
        ("later", "nanotron", "B200", "nanotron-h100"),
        ("later", "new", "GB300", "generic"),
        ("", "", "", "generic"),
    ],
)
def test_the_constants_of_a_row(family, software, gpu, stack):
    assert choose(load(), family, software, gpu) == stack


# What the README says.

RECIPES = {
    "Llama 3.1 405B": (
        "--model llama-3.1-405b --gpus 16384 --gpu H100 --sequence 8192 --batch-tokens 16M",
        "dp=128,tp=8,pp=16,zero=1,checkpoint=0",
    ),
    "OLMo 2 32B": (
        "--model olmo-2-32b --gpus 1024 --gpu H100 --sequence 4096 --batch-tokens 8M",
        "dp=16x64,micro=2,checkpoint=1",
    ),
    "DeepSeek-V3": (
        "--model deepseek-v3-dense --gpus 2048 --gpu H100 --sequence 4096 --batch-tokens 60M",
        "dp=128,pp=16,zero=1",
    ),
    "BLOOM 176B": (
        "--model bloom-176b --gpus 384 --gpu A100 --sequence 2048 --batch-tokens 4M --no-flash "
        "--stack bloom-a100",
        "dp=8,tp=4,pp=12,micro=2,zero=1,checkpoint=1",
    ),
    "OPT-175B": (
        "--model opt-175b --gpus 992 --gpu A100 --sequence 2048 --batch-tokens 1984K --no-flash",
        "dp=1x124,tp=8,checkpoint=1",
    ),
    "Megatron-530B": (
        "--model megatron-530b --gpus 2240 --gpu A100 --sequence 2048 --batch-tokens 3840K "
        "--no-flash",
        "dp=8,tp=8,pp=35,zero=0,checkpoint=1",
    ),
}


def cell(output: str) -> str:
    """Step, speed and MFU of an explanation, as a cell of the README's table."""
    found = re.search(r"step +([\d.]+) s: ([\d,]+) tokens/s per GPU, MFU ([\d.]+) %", output)
    return f"{float(found[1]):.1f} s, {found[2]} tokens/s, MFU {float(found[3]):.0f} %"


@pytest.mark.slow
@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe(name):
    flags, mesh = RECIPES[name]
    team, pick = (plan(*flags.split(), "--explain", line) for line in (mesh, "1"))
    row = next(line for line in README.splitlines() if line.startswith(f"| {name}"))
    title = re.search(r"^(dp\S+): (.*) \(micro", pick, re.MULTILINE)
    assert row.endswith(f"{cell(team)} | `{title[1]}`, {title[2]} | {cell(pick)} |")
    assert f"`{team.splitlines()[2].partition(':')[0]}`" in row


def test_numbers_of_the_readme():
    stacks = tomllib.loads(FILE.read_text())
    nanotron = stacks["nanotron-h100"]
    assert f"at least {1e3 * nanotron['pipelined_launch_s']:.1f} ms x tp" in README
    assert f"With {1e3 * stacks['bloom-a100']['hop_s']:.2f} ms per hop" in README
    assert f"the fitted efficiency is {stacks['bloom-a100']['gemm_efficiency']:.2f}" in README
    team = plan(*RECIPES["Llama 3.1 405B"][0].split(), "--explain", RECIPES["Llama 3.1 405B"][1])
    gib = float(re.search(r"total +([\d.]+)", team)[1])
    assert f"need {gib:.1f} GiB on the second stage" in README


def test_counts_of_the_readme():
    """What the pages say of the rows, of the code, and of the table that score.py prints."""
    import memory

    assert f"On {len(ROWS):,} published runs of ten frameworks" in README
    assert len({row["software"] for row in ROWS}) == 10
    faults = sum(row["fault_suspect"] == "1" for row in ROWS)
    assert f"**Fault rows** ({faults} of the playbook's)" in README
    assert {row["family"] for row in ROWS if row["fault_suspect"] == "1"} == {"playbook"}
    assert "at most six time constants" in README  # see test_at_most_six_constants_of_time
    assert '"Fits" leaves a tenth of the GPU\'s memory free' in README
    left = 1 - memory.USABLE
    assert left == pytest.approx(0.1)
    passes = [stack.memory_passes for stack, rest in load().values() if rest.get("rows")]
    assert "every kept byte crosses HBM about ten times" in README
    assert np.median(passes) == pytest.approx(10, abs=1)
    seconds = {row["row_id"]: measured(row, "step_time_s") for row in ROWS}
    assert re.search(rf"^\| BLOOM 176B, .* \| {seconds['bloom-083']:.0f} s \|", README, re.M)
    assert re.search(rf"^\| Megatron-530B, .* \| {seconds['mtnlg-001']} s \|", README, re.M)


def test_sentences_about_the_score():
    """The sentences below the first table, from the numbers of the table."""
    first = README.split("score.py --leave-out model")[1].split("Only the constants were")[0]
    rows = re.findall(r"^    (\w+) +\d+ +([\d.]+) +[\d.]+ +[-\d.]+ +(-?[\d.]+)", first, re.M)
    mape = {family: float(error) for family, error, _ in rows}
    skill = {family: float(value) for family, _, value in rows}
    assert len(rows) == len({row["family"] for row in ROWS})
    lone = [f for f in mape if len({r["model"] for r in ROWS if r["family"] == f}) == 1]
    assert (
        f"compare `llmc`, {mape['llmc']:.0f} % with a skill of {skill['llmc']}, with `mosaic`, "
        f"{mape['mosaic']:.0f} % with {skill['mosaic']}" in " ".join(README.split())
    )
    assert f"A family with one model only ({', '.join(f'`{f}`' for f in lone)})" in README
    errors = [round(mape[family]) for family in lone]
    assert f"the errors {min(errors)} to {max(errors)} %" in README
    above = sum(error > 3 for error in mape.values())
    assert (
        f"if they differ by 3 %: the mean error is larger than that in {above} of {len(mape)}"
        in README
    )
    negative = [f"`{f}`" for f in skill if skill[f] < 0 and f not in lone]
    assert f"Two more small families ({' and '.join(negative)}) have a negative skill" in README
    assert len(negative) == 2


def test_the_sentence_on_random_fifths():
    """The numbers in it, from the two tables."""

    def errors(key: str) -> dict[str, str]:
        table = README.split(f"score.py --leave-out {key}\n")[1].split("python planner")[0]
        return dict(re.findall(r"^    (\w+) +\d+ +([\d.]+) ", table, re.M))

    new, known = errors("model"), errors("fifth")
    for family, name in {"simumaxB200": "B200", "torchtitan2412": "torchtitan"}.items():
        assert f"{name} {known[family]} % instead of {new[family]} %" in FORMULAS


def jobs_of(scored: list) -> list[list]:
    """Runs of one model, number of GPUs and batch, where three or more were measured."""
    jobs = {}
    for s in scored:
        if not s.fault and measured(s.row, "step_time_s"):
            key = [s.row[k] for k in ("model", "n_gpus", "global_batch_sequences", "sequence")]
            jobs.setdefault(tuple(key), []).append(s)
    return [job for job in jobs.values() if len(job) > 2]


def costs(scored: list, prefer=lambda s: s.memory_gib) -> list[float]:
    """In percent of the fastest run: what the run with the smallest prediction costs, per job.

    prefer: decides between predictions that are equal to nine digits; the mean of equal runs.
    """
    found = []
    for job in jobs_of(scored):
        keys = {id(s): (f"{s.time_s:015.8f}", f"{prefer(s):015.8f}") for s in job if s.fits}
        first = min(keys.values())
        picks = [float(s.row["step_time_s"]) for s in job if keys.get(id(s)) == first]
        best = min(float(s.row["step_time_s"]) for s in job)
        found.append(100 * (np.mean(picks) / best - 1))
    return found


def of(scored: list, *families: str) -> list:
    return [s for s in scored if s.row["family"] in families]


def batch_and_time(row: dict) -> tuple[int, float]:
    return int(row["micro_batch_sequences"]), float(row["step_time_s"])


FORMULAS = " ".join((ROOT / "planner/formulas.md").read_text().split())


@pytest.fixture(scope="module")
def found() -> list:
    """The runs that formulas.md speaks of, each predicted without the runs of its model."""
    software = ("nanotron", "megatron-deepspeed", "nemo")
    return cross_validated([row for row in ROWS if row["software"] in software], "model")


@pytest.mark.slow
def test_what_formulas_md_says_of_skill(found):
    nemo = time_errors(of(found, "nemo2407"))
    start = f"is {nemo['skill']:.2f}: its eight runs differ by {nemo['constant_mape']:.1f} %"
    assert (
        f"{start} from one utilization, and the planner's error is {nemo['mape']:.1f} %" in FORMULAS
    )
    (run,) = [s for s in found if s.row["row_id"] == "nemo2407-011"]
    off = 100 * (1 - run.time_s / float(run.row["step_time_s"]))
    assert (run.row["model"], run.row["cp"]) == ("llama3-8b", "2")
    assert f"One run, Llama 3 8B with CP 2, is {off:.0f} % off" in FORMULAS
    every = time_errors(of(found, "dgxc", "dgxc2409", "nemo2407"))
    assert f"All {every['rows']} runs of NeMo together" in FORMULAS
    assert f"have a skill of {every['skill']:.2f}" in FORMULAS
    b200 = [row for row in ROWS if row["family"] == "simumaxB200"]
    skill = time_errors(cross_validated(b200, "row_id"))["skill"]
    assert f"B200** is {skill:.2f} if only the predicted run is left out" in FORMULAS


@pytest.mark.slow
def test_what_formulas_md_says_of_regret_on_the_playbook(found):
    playbook = of(found, "playbook")
    each = sorted(costs(playbook))
    assert f"12 of {len(each)} jobs cost at most {each[11]:.1f} %" in FORMULAS
    assert f"Six cost {each[12]:.0f} to {each[-1]:.0f} %, all on 128 or 256 GPUs" in FORMULAS
    for job in jobs_of(playbook):
        if costs(job)[0] > each[11]:
            key = lambda s: (round(s.time_s, 9), s.memory_gib)  # noqa: E731
            pick = min((s for s in job if s.fits), key=key).row
            best = min(job, key=lambda s: float(s.row["step_time_s"])).row
            assert pick["n_gpus"] in ("128", "256")
            assert pick["tp"] in "124"
            assert pick["micro_batch_sequences"] in "12"
            assert best["tp"] in "48"
            assert best["micro_batch_sequences"] in "48"


@pytest.mark.slow
def test_what_formulas_md_says_of_regret_on_vtrain(found):
    single, playbook = of(found, "vtrain_single"), of(found, "playbook")
    each = costs(single)
    assert f"the pick is the best mesh in {each.count(0)} of {len(each)} jobs" in FORMULAS
    faster, pairs = pairs_of_micro_batches("vtrain_single")
    assert f"the larger one was faster in all {pairs} pairs of runs" in FORMULAS
    assert faster == pairs
    assert "(playbook: {} of {})".format(*pairs_of_micro_batches("playbook")) in FORMULAS
    larger = [
        np.mean(costs(runs, lambda s: 1 / batch_and_time(s.row)[0])) for runs in (single, playbook)
    ]
    assert f"the mean from {np.mean(each):.1f} to {larger[0]:.1f} %, and" in FORMULAS
    assert f"from {np.mean(costs(playbook)):.1f} to {larger[1]:.1f} %: one run" in FORMULAS
    twice = [batch_and_time(row)[1] for row in ROWS if odd(row)]
    assert "took {:.2f} s where half the micro-batch took {:.2f} s".format(*twice[::-1]) in FORMULAS
    three = sorted(costs(of(found, "vtrain_multi")), reverse=True)
    assert "cost {:.1f}, {:.1f} and {:.1f} %".format(*three) in FORMULAS


@pytest.mark.slow
def test_what_formulas_md_says_of_regret_on_bloom(found):
    bloom = of(found, "bloom")
    each = costs(bloom)
    assert (each.count(0), len(each)) == (4, 6)  # "in four of six jobs"
    assert f"One job, with three runs, costs {max(each):.0f} %" in FORMULAS
    assert [len(job) for job in jobs_of(bloom) if costs(job)[0] == max(each)] == [3]
    not_a_mesh = (
        "row_id",
        "step_time_s",
        "memory_gib",
        "memory_kind",
        "outcome",
        "quality",
        "note",
    )
    repeats = {}
    for s in bloom:
        if s.row["step_time_s"]:
            key = tuple(value for column, value in s.row.items() if column not in not_a_mesh)
            repeats.setdefault(key, []).append(float(s.row["step_time_s"]))
    spread = [100 * (max(runs) / min(runs) - 1) for runs in repeats.values() if len(runs) > 1]
    assert len(spread) == 8
    assert f"differ by {np.median(spread):.1f} % (median of eight meshes)" in FORMULAS


def pairs_of_micro_batches(family: str) -> tuple[int, int]:
    """Of runs without a pipeline that differ in the micro-batch alone, neighbours by size: in how
    many pairs the larger micro-batch is faster, and how many pairs there are."""
    mesh = ("model", "n_gpus", "global_batch_sequences", "sequence", "dp_replicate", "dp_shard")
    alike = {}
    for row in ROWS:
        sound = row["family"] == family and row["step_time_s"] and row["fault_suspect"] != "1"
        if sound and row["pp"] == "1":
            key = tuple(row[k] for k in (*mesh, "zero_stage", "tp"))
            alike.setdefault(key, []).append(batch_and_time(row))
    pairs = [pair for runs in alike.values() for pair in itertools.pairwise(sorted(runs))]
    pairs = [(slow, fast) for (a, slow), (b, fast) in pairs if b > a]
    return sum(fast < slow for slow, fast in pairs), len(pairs)


def odd(row: dict) -> bool:
    """The two runs of Llama 1B on 64 GPUs whose times are no function of the micro-batch."""
    mesh = [row[k] for k in ("model", "n_gpus", "dp_replicate", "tp", "pp", "zero_stage")]
    small = row["micro_batch_sequences"] in ("1", "2")
    return mesh == ["llama-1B", "64", "64", "1", "1", "0"] and small


def test_stages_without_a_block_fail():
    from memory import has_empty_stage

    rows = [row for row in ROWS if row["family"] == "playbook"]
    model, mesh, _ = stacked(rows)
    empty = has_empty_stage(model, mesh, load()["nanotron-h100"][0])
    failed = np.array([row["outcome"] != "ok" for row in rows])
    assert f"{(empty & failed).sum()} of {empty.sum()} such runs failed" in README


def test_two_versions_of_nemo():
    """The same model, GPUs and batch in fp8: what a formula cannot know."""
    seconds = {}
    for row in ROWS:
        if row["model"] == "llama3-70b" and row["dtype"] == "fp8" and "dgxc" in row["family"]:
            key = row["n_gpus"], row["global_batch_sequences"]
            seconds.setdefault(key, {})[row["family"]] = float(row["step_time_s"])
    apart = [s["dgxc2409"] / s["dgxc"] for s in seconds.values() if len(s) == 2]
    assert f"are {100 * (np.median(apart) - 1):.0f} % apart on Llama 3 70B" in README


@pytest.mark.parametrize(
    ("name", "model", "tokens"), [("124 M", "gpt-124m", "64K"), ("1 B", "gpt-1b", "32K")]
)
def test_prediction_for_the_h100_that_calibrate_measured(name, model, tokens):
    job = ("--model", model, "--gpus", 1, "--sequence", 1024, "--batch-tokens", tokens)
    output = plan(*job, "--gpu", ROOT / "planner/measured_h100.toml")
    predicted = float(re.search(r"= +([\d.]+) +\d+ +\d+%", output)[1])
    row = re.search(rf"^\| {name}, .* \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|$", README, re.M)
    assert predicted == float(row[1])
    assert f"| {name}, {tokens.removesuffix('K')} sequences of 1,024 tokens |" in row[0]
    record = (ROOT / "benchmarks/results/gpu.md").read_text()
    for column, variant in ((2, "eager"), (3, "compile")):
        cells = re.search(rf"^\| {name.replace(' ', '')}, {variant} \|(.*)$", record, re.M)[
            1
        ].split("|")
        assert float(cells[2].split()[0]) / 1e3 == pytest.approx(float(row[column]), abs=6e-4)
    assert predicted == pytest.approx(float(row[2]), rel=0.1)


@pytest.mark.slow
def test_calibration_is_a_cluster_that_plan_reads(tmp_path):
    path = tmp_path / "new" / "machine.toml"
    script = ROOT / "planner/calibrate.py"
    pool.run(script, "--output", path, "--seconds", 0.1, "--device", "cpu", ranks=2).check()
    found = tomllib.loads(path.read_text())
    assert found["peak_tflops"] > 0
    assert found["constants"]["base_gib"] > 0.05
    assert found["constants"]["activation_factor"] == 2  # fp32; the formulas count bf16
    job = ("--model", "gpt-template", "--sequence", 128, "--batch-tokens", "2K", "--gpus", 2)
    assert "calibrated; no published run" in plan(*job, "--gpu", path)


def test_a_measured_layer_takes_the_time_that_the_formulas_say(monkeypatch):
    """On a CPU: what its products leave of a layer's time is memory_passes of the kept bytes.

    The layer has no mask: its attention takes twice the time of a causal one.
    """
    monkeypatch.setattr(calibrate, "median_seconds", lambda *_: 0.05)
    passes = calibrate.passes(flop_s=2e11, bytes_s=1e10, seconds=1.0)
    cluster = shapes.Cluster(16, 0.2, 10, 1, 1, 1)
    stack = stacks.Stack(gemm_efficiency=1, memory_passes=passes)
    model = shapes.Model(1, 256, 4, 4, 64, 1024, 0, 256, 0)
    one = dict.fromkeys(("dp_replicate", "dp_shard", "tp", "pp", "virtual_stages", "cp"), 1)
    none = ("zero_stage", "sequence_parallel", "full_checkpointing", "selective_checkpointing")
    batch = {"micro_batch": 8, "accumulation": 1, "sequence": 128, "flash": 1}
    given = (model, shapes.Mesh(**one, **dict.fromkeys(none, 0), **batch), cluster, stack)
    products, attention, traffic = (
        term(*given) for term in (step_time.products_s, step_time.attention_s, step_time.traffic_s)
    )
    assert products + 2 * attention + traffic == pytest.approx(0.05)


@pytest.mark.slow
def test_calibration_counts_what_an_optimizer_imports(tmp_path):
    """torch.optim imports 0.15 GiB more than torch, in a process that has trained nothing yet."""
    script = tmp_path / "optimizer.py"
    script.write_text(
        "import resource, torch\n"
        "torch.optim.AdamW([torch.zeros(1)])\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20)\n"
    )
    expected = float(python(script, cold=True).check().output)
    options = ("--output", tmp_path / "machine.toml", "--seconds", 0.05, "--device", "cpu")
    python(ROOT / "planner/calibrate.py", *options, cold=True).check()
    constants = tomllib.loads((tmp_path / "machine.toml").read_text())["constants"]
    assert constants["base_gib"] == pytest.approx(expected, rel=0.05)


def test_the_benchmark_plans_each_mesh_that_it_trains():
    """benchmarks/planner.py: its flags of train.py and its sizes for the planner are one mesh."""
    spec = importlib.util.spec_from_file_location("planner_bench", ROOT / "benchmarks/planner.py")
    benchmark = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(benchmark)
    for name, (ranks, flags, sizes) in benchmark.MESHES.items():
        seconds, gib = benchmark.predicted(str(ROOT / "planner/measured_h100.toml"), name)
        assert seconds > 0
        assert gib > 0
        split = dict(re.findall(r"--(dp-replicate|dp-shard|tp|pp) (\d+)", flags))
        product = 1
        for axis, size in split.items():
            assert sizes[axis.replace("-", "_")] == int(size), name
            product *= int(size)
        assert product == ranks, name


def test_what_chapter_21_says_of_its_tables():
    """The numbers of its sentences are those of the outputs above them."""
    cells = json.loads((ROOT / "notebooks/21_choosing_a_mesh.ipynb").read_text())["cells"]
    said = " ".join("".join(c["source"]) for c in cells if c["cell_type"] == "markdown")
    shown = "\n".join("".join(o.get("text", "")) for c in cells for o in c.get("outputs", []))
    times = [float(x) for x in re.findall(r"^(?: +\d+){5} +(\d+\.\d\d)$", shown, re.M)]
    assert max(times) / min(times) == pytest.approx(424, rel=0.01)  # the table has two digits
    assert "is 424 times slower" in said
    rows = dict(re.findall(r"^(products|\+ \w+) +(0\.\d\d) +\d+\.\d", shown, re.M))
    means = dict(re.findall(r"^(products|\+ \w+) +0\.\d\d +(\d+\.\d)", shown, re.M))
    assert f"it was {rows['products']}" in said
    assert f"it is {rows['+ rest']}" in said
    assert (
        f"the error was {means['+ TP']} %, and adding DP made it *worse*, {means['+ DP']} %" in said
    )
    assert "a single MFU is wrong by 6.5 %" in said
    assert re.search(r"^the ladder and 6 more, A100 +6\.5 ", shown, re.M)
    assert "it loses 15 % on average" in said
    assert re.search(r"^as much DP as possible +15 ", shown, re.M)
    regret = re.search(r"^    playbook .* ([\d.]+) / [\d.]+ / [\d.]+ / [\d.]+$", README, re.M)[1]
    assert f"it loses {regret} % on average: [planner/README.md]" in said


def test_what_chapter_21_says_of_its_job():
    said = (ROOT / "notebooks/21_choosing_a_mesh.ipynb").read_text()
    job = {"family": "playbook", "model": "llama-3B", "n_gpus": "128"}
    job |= {"global_batch_sequences": "256", "sequence": "4096"}
    runs = [r for r in read(PUBLISHED) if all(r[key] == value for key, value in job.items())]
    used = [r for r in runs if r["outcome"] == "ok" and r["fault_suspect"] != "1"]
    settings = {
        (int(r["dp_replicate"]) * int(r["dp_shard"]), r["tp"], r["pp"], r["micro_batch_sequences"])
        for r in used
    }
    meshes = {setting[:3] for setting in settings}
    crashed = sum(r["outcome"] != "ok" for r in runs)
    assert f"We use {len(used)} of its {len(runs)} runs: {crashed} crashed" in said
    assert f"and {len(runs) - len(used) - crashed} had the fault" in said
    assert f"The {len(used)} runs are on {len(meshes)} meshes" in said
    seconds = {id(r): float(r["step_time_s"]) for r in used}
    slowest = max((r for r in used if r["pp"] == "1"), key=lambda r: seconds[id(r)])
    assert (slowest["tp"], slowest["micro_batch_sequences"]) == ("32", "1")
    factor = seconds[id(slowest)] / min(seconds.values())
    assert f"it takes {seconds[id(slowest)]:.1f} s, {factor:.0f} times as long" in said
    assert round(max(seconds.values()) / min(seconds.values()) / factor) == 9


def test_what_chapter_21_says_of_rules_of_thumb():
    """Which part of a regret is nanotron's delay, and which jobs a rule cannot start."""
    said = (ROOT / "notebooks/21_choosing_a_mesh.ipynb").read_text()
    jobs = {}
    for row in (r for r in read(PUBLISHED) if r["family"] == "playbook"):
        key = row["model"], row["n_gpus"], row["global_batch_sequences"], row["sequence"]
        jobs.setdefault(key, []).append(row)

    def sizes(row):
        dp = int(row["dp_replicate"]) * int(row["dp_shard"])
        return dp, int(row["tp"]), int(row["pp"]), -int(row["micro_batch_sequences"])

    stack = load()["nanotron-h100"][0]
    without = dataclasses.replace(stack, pipelined_launch_s=0)
    regrets, crashed = [], []
    for (model, *_), launched in jobs.items():
        ran = [r for r in launched if r["outcome"] == "ok" and r["fault_suspect"] != "1"]
        if len(ran) >= 8:
            first = min(launched, key=lambda r: (-sizes(r)[0], *sizes(r)[1:]))
            again = [r for r in launched if sizes(r) == sizes(first)]
            crashed += [model] * all(r["outcome"] != "ok" for r in again)
            delay = [step_time.step_s(*stacked(ran), constants) for constants in (stack, without)]
            times = np.array([float(r["step_time_s"]) for r in ran]) * delay[1] / delay[0]
            deepest = [(-pp, -dp, tp, batch) for dp, tp, pp, batch in map(sizes, ran)]
            regrets.append(100 * (times[deepest.index(min(deepest))] / times.min() - 1))
    loses = f"loses {np.mean(regrets):.0f} % on average and {max(regrets):.0f} % at worst"
    assert loses in said
    assert f"On {len(crashed)} of the {len(regrets)} jobs" in said
    assert crashed.count("llama-8B") == 6 == sum(model == "llama-8B" for model, *_ in jobs)


# The table of transformer_basics/running.md.

SMALL = {"num_hidden_layers": 30, "hidden_size": 576, "num_attention_heads": 9, "head_dim": 64}
SMALL |= {"num_key_value_heads": 3, "intermediate_size": 1536, "vocab_size": 49152}
ONE_B = {"num_hidden_layers": 16, "hidden_size": 2048, "num_attention_heads": 32, "head_dim": 64}
ONE_B |= {"num_key_value_heads": 8, "intermediate_size": 8192, "vocab_size": 128256}
COMMON = {"tie_word_embeddings": True, "model_type": "llama", "hidden_act": "silu"}
# name -> model, GPUs, kind, constants, tokens of a sequence, sequences of a step
PREDICTED = {
    "135 M": (SMALL | COMMON, 2, "laptop", "generic", 512, 8),
    "1 B": (ONE_B | COMMON, 8, "H100", "torchtitan-h100", 8192, 64),
    "8 B": ("llama-3-8b", 8, "H100", "torchtitan-h100", 8192, 64),
    "8 B, 64": ("llama-3-8b", 64, "H100", "torchtitan-h100", 8192, 512),
    "70 B": ("llama-3-70b", 64, "H100", "torchtitan-h100", 8192, 512),
}


@pytest.mark.parametrize("name", PREDICTED)
def test_the_gpts_table_is_what_the_planner_predicts(name):
    """The fastest mesh that fits, of those with FSDP, 1F1B, and no context parallelism."""
    model, gpus, kind, constants, sequence, batch = PREDICTED[name]
    shape = inputs.model(model) if isinstance(model, str) else inputs.from_hugging_face(model)
    cluster, stack = inputs.cluster(kind)[0], inputs.stack(constants)[0]
    job = Job(shape, cluster, stack, gpus, sequence, batch)
    own = [m for m in meshes(job) if (m.zero_stage, m.virtual_stages, m.cp) == (3, 1, 1)]
    best = min((p for p in evaluate(job, own) if p.fits), key=lambda plan: plan.step_s)
    flags = command.flags(job, best).partition("--accumulate")
    row = (
        f"| {name.partition(',')[0]} | {gpus} x {kind} | {sequence:,} x {batch} "
        f"| `{''.join(flags[1:])}` | {best.total_gib:.1f} "
        f"| {report.tokens_per_second(job, best):,.0f} | {report.mfu(job, best):.0%} |"
    )
    assert row in (ROOT / "transformer_basics/running.md").read_text(), row
