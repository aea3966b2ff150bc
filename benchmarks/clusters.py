"""Measure slow links between hosts, and the cost of faults, on lab hosts of this machine.

    python benchmarks/clusters.py                                       # writes results/clusters.md
    python benchmarks/clusters.py --parts hsdp --repeats 3 --no-write   # a quick look

links          DDP and FSDP on one host, and on two at 10 Gbit/s, 1 Gbit/s and 100 Mbit/s
hsdp           HSDP, which shards on a host and replicates between hosts, against FSDP
compression    gradients in fp16 and by PowerSGD against uncompressed ones, at 100 Mbit/s
faults         kill -9, a cut cable, a frozen host: seconds until the fault is noticed, and until
               the next step, with torchrun's restarts, with elastic hosts, with torchft

Needs Linux with ip, tc, unshare and nsenter, and root or user namespaces (clusters/lab.py). The
hosts share this machine's cores, so samples/s say nothing about more cores.
"""

import argparse
import subprocess
import sys

import bench
from clusters_faults import faults_text
from clusters_links import LAB, TEXTS

PARTS = TEXTS | {"faults": lambda repeats: faults_text(min(repeats, 3))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5, help="repeats (of faults: at most 3)")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--no-write", action="store_true", help="only print the results")
    args = parser.parse_args()
    if args.repeats < 1:
        parser.error(f"--repeats {args.repeats} must be 1 or more")
    if reason := why_no_lab():
        sys.exit(f"nothing was measured: {reason}")
    sections = [section for name in args.parts for section in PARTS[name](args.repeats)]
    if args.no_write:
        print("\n\n".join(sections))
    else:
        bench.write(
            "clusters", "Several hosts: what a slow link costs, and what a fault costs", sections
        )


def why_no_lab() -> str | None:
    """Why this machine cannot run a lab, or None."""
    command = [sys.executable, str(LAB), "--name", "benchmark-probe"]
    done = subprocess.run([*command, "up", "1"], capture_output=True, text=True, timeout=60)
    if done.returncode:
        return done.stderr.strip()
    subprocess.run([*command, "down"], check=True, timeout=60)
    return None


if __name__ == "__main__":
    main()
