"""Make the pictures of the READMEs, except demo.gif: python docs/pictures.py

Most pictures come from the notebooks, where code draws them from the ranks' records, one from
planner/plan.py. This script draws the map, the two hosts and the badges. A test makes all again and
compares.
"""

import base64
import io
import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "docs/pictures"


@dataclass(frozen=True)
class Picture:
    name: str
    chapter: str
    cell: str  # beginning of the last line of the cell that draws it
    number: int = 0  # index among the pictures below that cell


FROM_CHAPTERS = (
    Picture("strategies", "00_start_here", "pictures.strategies()"),
    Picture("all_to_all", "03_collectives", "pictures.all_to_all(", 1),
    Picture("ddp", "06_ddp", "ddp.data_parallel("),
    Picture("zero_memory", "08_sharding_memory", "sharding_memory.stages("),
    Picture("t5_parts", "11_finetune_t5", "figures.t5.anatomy("),
    Picture("tensor_parallel", "13_tensor_parallel", "tensor_parallel.pair()"),
    Picture("tp_fsdp", "14_tp_fsdp", "    assert torch.equal(held["),
    Picture("elastic", "19_clusters", "pictures.coming_and_going("),
    Picture("inside_all_reduce", "22_inside_torch_distributed", "inside.all_reduce(call)"),
    Picture("rpc_calls", "23_rpc", "pictures.calls("),
)

BADGES = {
    "runs": ("runs", "on a laptop, without a GPU"),
    "python": ("python", "3.11 or newer"),
    "torch": ("torch", "2.11 to 2.15"),
    "license": ("license", "BSD-3-Clause"),
}

# Part of the course, its chapters, the directory to copy, the directory's content.
MAP = (
    ("I  communication", "01-05", "collectives/", "groups, collectives, their cost, hangs"),
    ("II  data parallelism", "06-07", "ddp_basics/", "DDP: a training script that survives faults"),
    ("III  sharding", "08-10", "fsdp_basics/", "FSDP2: memory, sharded checkpoints"),
    ("", "11", "t5_finetuning/", "a Hugging Face model under FSDP2"),
    ("IV  model parallelism", "12-16", "parallel_basics/", "tensor, pipeline, context parallel"),
    ("", "14", "transformer_basics/", "a GPT on any mesh of these"),
    ("V  at scale", "18-19", "clusters/", "Slurm, Kubernetes, slow and dead hosts"),
    ("", "21", "planner/", "which mesh, how much memory, how many seconds"),
    ("VI  below and beside", "22", "custom_backend/", "a backend below dist.all_reduce"),
    ("", "23", "rpc_basics/", "remote calls, a parameter server"),
)
COLOURS = ("#56b4e9", "#e69f00", "#009e73", "#cc79a7", "#0072b2", "#d55e00")


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for name, content in made().items():
        (FOLDER / name).write_bytes(content)


def made() -> dict[str, bytes]:
    """File name -> content of each picture."""
    files = {f"{picture.name}.png": stored(picture) for picture in FROM_CHAPTERS}
    files |= {f"badge_{name}.svg": badge(*words).encode() for name, words in BADGES.items()}
    drawn = {"map.svg": course_map().encode(), "two_hosts.png": two_hosts(), "plan.png": plan()}
    return files | drawn


def plan() -> bytes:
    """What `plan.py --plot` draws for the job of planner/README.md."""
    job = "--model llama-3-8b --gpus 64 --gpu H100 --sequence 8192 --batch-tokens 4M"
    with tempfile.TemporaryDirectory() as folder:
        picture = Path(folder) / "plan.png"
        command = [sys.executable, ROOT / "planner/plan.py", *job.split(), "--plot", picture]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        return picture.read_bytes()


def two_hosts(gpus: int = 4) -> bytes:
    """A job on two hosts: what torchrun tells each rank, and which links the ranks have."""
    sys.path.append(str(ROOT / "notebooks"))
    import figures

    figure, ax = figures.canvas(3.4, (0, 20), (-0.4, 8.6))
    figure.subplots_adjust(left=0, right=1, bottom=0, top=1)
    for host in range(2):
        left, middle = 0.2 + 10.4 * host, 4.8 + 10.4 * host
        figures.box(ax, middle, 4.5, "", "white", 9.2, 6.4)
        ax.text(middle, 8.0, f"host{host}", ha="center", weight="bold")
        figures.box(ax, middle, 7.0, f"torchrun: starts and restarts {gpus} ranks", width=8.8)
        for local in range(gpus):
            x = left + 1.25 + 2.24 * local
            words = f"RANK={host * gpus + local}\nLOCAL_RANK\n= {local}\ncuda:{local}"
            figures.arrow(ax, (x, 6.6), (x, 5.75))
            figures.box(ax, x, 4.45, words, host * gpus + local, 2.1, 2.6)
        ax.plot([left + 0.4, left + 8.8], [2.6, 2.6], color=figures.LINES[2], linewidth=5)
        ax.text(middle, 1.75, "NVLink, PCIe or shared memory", ha="center")
    ax.plot([9.0, 11.0], [2.6, 2.6], color=figures.LINES[1], linewidth=3)
    ax.text(10, 0.7, "orange: the network, a job's slowest link", ha="center")
    meet = "the torchruns meet at host0:29500 and number the ranks"
    ax.text(10, 0.0, f"{meet}; each gets WORLD_SIZE={2 * gpus}", ha="center")
    file = io.BytesIO()
    figure.savefig(file, dpi=150, metadata={"Software": None})
    return file.getvalue()


def stored(picture: Picture) -> bytes:
    """The PNG below a cell of a chapter. Raises ValueError if the cell is not there once."""
    cells = json.loads((ROOT / f"notebooks/{picture.chapter}.ipynb").read_text())["cells"]
    found = [
        output["data"]["image/png"]
        for cell in cells
        if cell["cell_type"] == "code" and cell["source"]
        if "".join(cell["source"]).rstrip().splitlines()[-1].startswith(picture.cell)
        for output in cell["outputs"]
        if "image/png" in output.get("data", {})
    ]
    if len(found) <= picture.number:
        raise ValueError(f"{picture.chapter} has no picture below a cell with {picture.cell}")
    return base64.b64decode("".join(found[picture.number]))


def badge(left: str, right: str) -> str:
    """An SVG of two boxes with these words, 20 pixels high."""
    widths = [7 * len(words) + 12 for words in (left, right)]
    centres = [widths[0] / 2, widths[0] + widths[1] / 2]
    return f"""<svg xmlns="http://www.w3.org/2000/svg" width="{sum(widths)}" height="20" role="img">
<title>{left}: {right}</title>
<rect width="{sum(widths)}" height="20" rx="3" fill="#0072b2"/>
<rect width="{widths[0]}" height="20" rx="3" fill="#444"/>
<g fill="#fff" text-anchor="middle" font-family="DejaVu Sans, Verdana, sans-serif" font-size="11">
<text x="{centres[0]}" y="14">{left}</text>
<text x="{centres[1]}" y="14">{right}</text>
</g>
</svg>
"""


def course_map() -> str:
    """An SVG: the parts of the course, and the directories that they lead to."""
    row, width = 40, 880
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{row * len(MAP) + 50}"'
        ' role="img" font-family="DejaVu Sans, Verdana, sans-serif" font-size="14">',
        "<title>The chapters of the course, and the directories to copy</title>",
        '<rect width="100%" height="100%" fill="#fff"/>',
        '<text x="20" y="28" font-weight="bold">the course: notebooks/</text>',
        '<text x="380" y="28" font-weight="bold">directories to copy</text>',
    ]
    part = -1
    for number, (title, chapters, directory, what) in enumerate(MAP):
        y = 45 + row * number
        part += bool(title)
        colour = COLOURS[part]
        box = f'height="32" rx="4" fill="{colour}" opacity="0.25"/>'
        lines += [
            f'<rect x="20" y="{y}" width="290" {box}',
            f'<text x="30" y="{y + 21}">{title}</text>',
            f'<text x="300" y="{y + 21}" text-anchor="end">{chapters}</text>',
            f'<path d="M310 {y + 16} H372" stroke="{colour}" stroke-width="3"/>',
            f'<path d="M368 {y + 10} L378 {y + 16} L368 {y + 22}" fill="{colour}"/>',
            f'<rect x="380" y="{y}" width="480" {box}',
            f'<text x="390" y="{y + 21}" font-weight="bold">{directory}</text>',
            f'<text x="560" y="{y + 21}">{what}</text>',
        ]
    return "\n".join([*lines, "</svg>", ""])


if __name__ == "__main__":
    main()
