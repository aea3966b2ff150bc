"""Re-execute notebooks from fresh kernels and save them with their outputs.

    python notebooks/execute.py                         # the whole course
    python notebooks/execute.py notebooks/06_ddp.ipynb  # one chapter

A notebook is saved only if every cell ran, and no cell raised but those tagged raises-exception.
What differs between runs or machines without meaning anything (times, ids, paths) is not saved.
"""

import argparse
import os
import sys
import time
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError

HERE = Path(__file__).resolve().parent


def main() -> None:
    args = parse_args()
    # The kernels inherit these. Quiet: a slow start leaves no trace on the page.
    os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "COURSE_QUIET": "yes"}
    failed = []
    for path in args.notebooks or sorted(HERE.glob("*.ipynb")):
        started = time.perf_counter()
        try:
            notebook = execute(path, args.cell_timeout)
        except (CellExecutionError, CellTimeoutError, DeadKernelError) as error:
            failed.append(path.name)
            print(f"{path.name}: not saved\n{error}", file=sys.stderr)
            continue
        size = sum(len(str(cell.get("outputs", ""))) for cell in notebook.cells)
        nbformat.write(notebook, path)
        seconds = time.perf_counter() - started
        print(f"{path.name}: {seconds:.0f} s, outputs {size / 1000:.0f} KB", flush=True)
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


def execute(path: Path, cell_timeout: float) -> nbformat.NotebookNode:
    """Run all cells in a fresh kernel and return the cleaned notebook."""
    notebook = nbformat.read(path, as_version=4)
    NotebookClient(
        notebook,
        timeout=cell_timeout,
        kernel_name="python3",
        resources={"metadata": {"path": str(HERE)}},  # the working directory of the kernel
        record_timing=False,
        coalesce_streams=True,
    ).execute()
    for cell in notebook.cells:
        if cell.cell_type == "code":
            raised = any(output.output_type == "error" for output in cell.outputs)
            if "raises-exception" in cell.metadata.get("tags", []) and not raised:
                raise CellExecutionError(f"should have raised:\n{cell.source}", "", "")
    return clean(notebook)


def clean(notebook: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """Drop what no reader needs, so that a diff shows what has really changed."""
    notebook.metadata = nbformat.from_dict(
        {
            "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
            "language_info": {"name": "python"},
        }
    )
    for cell in notebook.cells:
        kept = {key: cell.metadata[key] for key in ("tags", "jupyter") if key in cell.metadata}
        cell.metadata = nbformat.from_dict(kept)
        for output in cell.get("outputs", []):
            if "metadata" in output:
                output.metadata = nbformat.from_dict({})  # of %%px: times and ids of engines
            if output.output_type == "error":
                output.traceback = [without_paths(line) for line in output.traceback]
    return notebook


def without_paths(text: str) -> str:
    return text.replace(sys.prefix, "...").replace(f"{HERE.parent}{os.sep}", "")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("notebooks", nargs="*", type=Path, help="default: all in this directory")
    parser.add_argument("--cell-timeout", type=float, default=300, help="seconds for one cell")
    args = parser.parse_args()
    for path in args.notebooks:
        if not path.is_file():
            parser.error(f"there is no notebook {path}")
    return args


if __name__ == "__main__":
    main()
