"""Make docs/pictures/demo.gif: two ranks train, one is killed, the job continues, same result.

    .venv/bin/python docs/demo.py

It records two real runs: one undisturbed, and one whose rank 1 is killed after step 91. The picture
shows the output of the second run (without losses and torchrun's traceback) and its loss at each
step, but not its speed.
"""

import json
import math
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import matplotlib
import psutil
from PIL import Image, ImageDraw, ImageFont

ROOT = Path(__file__).resolve().parent.parent
STEPS, KILL_AT, SAVE_EVERY = 220, 91, 20
OUTPUT = "runs/digits"  # here: a temporary folder
SCRIPT = f"ddp_basics/train.py --epochs 10 --checkpoint-every {SAVE_EVERY} --output-dir {OUTPUT}"
COMMAND = f"torchrun --standalone --nproc_per_node=2 --max-restarts=1 {SCRIPT}"

WIDTH, HEIGHT, LINE, MARGIN = 800, 520, 19, 14
BLACK, WHITE, GRAY, RED, BLUE = "#101418", "#e6e6e6", "#8a9199", "#ff6b5e", "#56b4e9"
LOSSES = (60, 330, 780, 490)  # left, top, right, bottom of the curve, in pixels
FONT_FILE = Path(matplotlib.get_data_path()) / "fonts/ttf/DejaVuSansMono.ttf"
FONT = ImageFont.truetype(str(FONT_FILE), 14)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        train(Path(folder) / "undisturbed", kill_at=None)
        said = train(Path(folder) / "killed", kill_at=KILL_AT)
        expected = learned(Path(folder) / "undisturbed")
        if learned(Path(folder) / "killed") != expected:
            sys.exit("error: the losses of the killed run differ from those of the undisturbed run")
    frames = draw(said, {step: x for (step, name), x in expected.items() if name == "loss"})
    frames[0][0].save(
        ROOT / "docs/pictures/demo.gif",
        save_all=True,
        append_images=[image for image, _ in frames[1:]],
        duration=[milliseconds for _, milliseconds in frames],
        loop=0,
    )


def train(folder: Path, kill_at: int | None) -> list[str]:
    """Run COMMAND and return its output lines, with a line for the kill."""
    command = [*COMMAND.replace(OUTPUT, str(folder)).split(), "--log-every", "1"]
    command[0] = Path(sys.executable).with_name("torchrun")
    job = subprocess.Popen(
        command,
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    lines = []
    for line in job.stdout:
        lines.append(line.rstrip())
        if kill_at and re.match(rf"step +{kill_at}/", line):
            ranks = psutil.Process(job.pid).children()
            (rank_1,) = (process for process in ranks if process.environ().get("RANK") == "1")
            rank_1.kill()
            lines.append(f"$ kill -9 {rank_1.pid}      # rank 1, from another terminal")
            kill_at = None
    if job.wait() or kill_at:
        sys.exit(f"error: status {job.returncode} of {COMMAND}")
    return lines


def learned(folder: Path) -> dict[tuple[int, str], float]:
    """(step, "loss", "test_loss" or "test_accuracy") -> its value."""
    entries = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    names = ("loss", "test_loss", "test_accuracy")
    return {(e["step"], name): e[name] for e in entries for name in names if name in e}


def draw(said: list[str], expected: dict[int, float]) -> list[tuple[Image.Image, int]]:
    """The frames, each with its duration in milliseconds."""
    terminal = [("$ " + COMMAND.removesuffix(SCRIPT) + "\\", WHITE), (f"      {SCRIPT}", WHITE)]
    curve: list[tuple[int, float]] = []
    frames = [(frame(terminal, curve, expected), 1500)]
    for line in said:
        if step := re.match(r"step +(\d+)/.* epoch .* loss ([0-9.e-]+) +lr", line):
            curve.append((int(step[1]), float(step[2])))
            if curve[-1][0] % 10 == 0:
                frames.append((frame(terminal, curve, expected), 120))
        elif words := shown(line):
            bad = words.startswith(("$ kill", "failed"))
            terminal.append((words, RED if bad else WHITE))
            frames.append((frame(terminal, curve, expected), 120 if "step" in words else 1500))
    terminal.append(("each loss, and the accuracy, equals that of the undisturbed run", BLUE))
    return [*frames, (frame(terminal, curve, expected), 6000)]


def shown(line: str) -> str:
    """The line as the picture shows it; "" if the picture leaves it out."""
    if "test accuracy" in line and line.startswith("step"):
        return line
    if line.startswith(("2 rank(s)", "test loss", "$ kill")):
        return line
    if line.startswith("continuing from"):
        return "continuing from checkpoints " + line[line.index("after") :]
    if "failed (exitcode" in line:
        return line[line.index("failed") : line.index(" of binary")]
    return ""


def frame(terminal: list, losses: list, expected: dict[int, float]) -> Image.Image:
    image = Image.new("RGB", (WIDTH, HEIGHT), BLACK)
    pen = ImageDraw.Draw(image)
    for row, (line, colour) in enumerate(terminal[-15:]):
        pen.text((MARGIN, MARGIN + row * LINE), line, font=FONT, fill=colour)
    left, top, right, bottom = LOSSES
    lowest, highest = math.log(min(expected.values())), math.log(max(expected.values()))

    def place(step: int, loss: float) -> tuple[float, float]:
        up = (math.log(loss) - lowest) / (highest - lowest)
        return left + (right - left) * step / STEPS, bottom - (bottom - top) * up

    pen.line([(left, top), (left, bottom), (right, bottom)], fill=GRAY)
    pen.text((MARGIN, top - 22), "training loss, logarithmic", font=FONT, fill=GRAY)
    pen.text((right - 110, bottom + 6), f"step {STEPS}", font=FONT, fill=GRAY)
    pen.text((left, bottom + 6), "0", font=FONT, fill=GRAY)
    pen.line([place(*pair) for pair in expected.items()], fill=GRAY, width=5)
    pen.text((right - 230, top - 2), "gray: an undisturbed run", font=FONT, fill=GRAY)
    for pieces in runs(losses):
        if len(pieces) > 1:
            pen.line([place(*pair) for pair in pieces], fill=BLUE, width=2)
    if any(line.startswith("$ kill") for line, _ in terminal):
        x = place(KILL_AT, 1)[0]
        pen.line([(x, top + 20), (x, bottom)], fill=RED, width=2)
        pen.text((x + 6, top + 20), f"rank 1 killed at step {KILL_AT}", font=FONT, fill=RED)
    return image.quantize(32)


def runs(losses: list[tuple[int, float]]) -> list[list[tuple[int, float]]]:
    """The curve in pieces: a new piece begins where the step number goes back."""
    pieces: list[list[tuple[int, float]]] = [[]]
    for pair in losses:
        if pieces[-1] and pair[0] <= pieces[-1][-1][0]:
            pieces.append([])
        pieces[-1].append(pair)
    return pieces


if __name__ == "__main__":
    main()
