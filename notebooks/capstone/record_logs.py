"""Run the three jobs of logs/ under torchrun, and write what they print: logs/job_1.txt, ...

    python notebooks/capstone/record_logs.py    # one to five minutes

Left out: times, processes, paths of this machine, and frames of PyTorch's own files.
"""

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

LOGS = Path(__file__).resolve().parent / "logs"
STARTS = {1: 1, 2: 2, 3: 1}  # job -> how often it is started
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=3"]


def main() -> None:
    for job, starts in STARTS.items():
        with tempfile.TemporaryDirectory() as folder:
            text = "\n".join(run(job, folder) for _ in range(starts))
        (LOGS / f"job_{job}.txt").write_text(text)
        print(f"job {job}: {text.count(chr(10))} lines")


def run(job: int, folder: str) -> str:
    """One start: the command, then what it prints."""
    command = [*TORCHRUN, f"job_{job}.py", *([folder] if job == 2 else [])]
    done = subprocess.run(
        command,
        cwd=LOGS,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=600,
    )
    arguments = " runs" if job == 2 else ""
    typed = f"$ torchrun --standalone --nproc_per_node=3 job_{job}.py{arguments}\n"
    return typed + plain(done.stdout) + f"(exit status {done.returncode})\n"


def plain(text: str) -> str:
    """The text without what differs between runs or machines."""
    lines = r"(?:\[rank\d\]:)?[\[ ]?[EWI]\d{4} .*|  time +: .*|  host +: .*|  File \"<frozen .*"
    lines += r"|Traceback .*(?=\n  File \"<frozen)"
    text = re.sub(rf"^(?:{lines})\n", "", text, flags=re.MULTILINE)
    text = re.sub(r" \(pid: \d+\)| by PID \d+|(?<=\[127\.0\.0\.1\]):\d+", "", text)
    text = text.replace(f"{LOGS}/", "")
    # A rank writes its line and the end of the line apart, and another rank in between.
    text = re.sub(r"(?<=\d)(?=rank \d, )|\n+(?=\n)", lambda m: "" if m[0] else "\n", text)
    # A frame of PyTorch: its line, and the source and marks below it.
    frame = r'^(\[rank\d\]: )?  File "/.*", line \d+, in .*\n(?:(?:\[rank\d\]: )?    .*\n)*'
    return re.sub(frame, "", text, flags=re.MULTILINE)


if __name__ == "__main__":
    main()
