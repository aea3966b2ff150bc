"""What the chapters share: ranks that stay alive between cells, and scripts under torchrun.

start_ranks(2)    two processes that wait for %%px cells, joined in one Gloo process group
gather("x")       what each rank calls `x`: a list in rank order
stop_ranks()      end the processes; the end of the kernel, of whatever kind, does that too
run_script("ddp_basics/train.py", "--epochs", 2, ranks=2)    runs a script of this repository
check(right, answer)    whether an exercise is solved: see exercises.py. Pictures: see figures/.

A rank that dies, or waits for ever, does not end the page: see _px().
"""

import contextlib
import os
import re
import shutil
import subprocess
import sys
import threading
import time
import uuid
from pathlib import Path

from exercises import check as check  # for the chapters
from processes import end_processes, folder_of

ROOT = Path(__file__).resolve().parent.parent
KERNEL = uuid.uuid4().hex  # marks, in the environment, every process that this kernel starts
FOLDER = folder_of(KERNEL)  # temporary files
_client = None  # ipyparallel's connection to the ranks, while there are any
_started = ()  # (n, timeout) of the last start_ranks()
_cells = []  # (line, cell) of each %%px that has run without an error since then
_ipyparallel = {}  # its own %px and %%px


def start_ranks(n: int = 2, timeout: float = 20) -> None:
    """Start `n` processes, one per rank, for %%px cells; ranks that ran before are ended first.

    Each has `torch`, `dist` (torch.distributed), `timedelta`, `rank`, `world_size`, `store`,
    `check` and `on_all_ranks`, and is a member of a Gloo process group. A collective that waits
    over `timeout` seconds for another rank raises; the group is then broken: call start_ranks()
    again. After a check, and when a rank has died, this happens by itself.
    """
    global _client, _started
    import ipyparallel

    stop_ranks()
    os.environ["COURSE_MARK"] = f"{KERNEL}/ranks"
    folder = FOLDER / "ranks"
    cluster = ipyparallel.Cluster(profile_dir=str(folder), log_level=50, shutdown_atexit=False)
    # Nothing here gives up early: a busy machine takes long to import PyTorch.
    options = [f"--profile-dir={folder}", f"--cluster-id={cluster.cluster_id}"]
    options += ["--IPEngine.wait_for_url_file=600", "--IPEngine.timeout=600"]
    try:
        with _saying("the controller, which passes cells on to the ranks"):
            cluster.start_controller_sync()
            cluster.controller.connection_info_timeout = 600
            with open(FOLDER / "ranks.log", "ab") as log:  # what they say beside the page
                command = [sys.executable, ROOT / "notebooks/ranks.py", str(n), *options]
                processes = subprocess.Popen(
                    command, stdout=log, stderr=log, start_new_session=True
                )
            _client = cluster.connect_client_sync(timeout=600)
        with _saying(lambda: f"{n - len(_client.ids)} of {n} ranks, which import PyTorch"):
            while len(_client.ids) < n:
                if processes.poll() is not None:
                    said = (FOLDER / "ranks.log").read_text()[-2000:]
                    raise RuntimeError(f"the ranks have ended before they were ready:\n{said}")
                time.sleep(0.05)
        with _saying("the ranks to meet in a process group"):
            ranks = _client[:]
            ranks.block = True  # before activate(), or %%px would not wait for the ranks
            ranks.scatter("rank", range(n), flatten=True)
            ranks.push({"world_size": n, "seconds": timeout})
            ranks.execute("import torch, torch.distributed as dist; from datetime import timedelta")
            # Ranks find each other in a store, which rank 0 serves on whatever port is free.
            store = "store = dist.TCPStore('127.0.0.1', {}, is_master={}, wait_for_workers=False)"
            _client[0].execute(store.format(0, True) + "; port = store.port", block=True)
            if n > 1:
                _client[1:].execute(store.format(_client[0]["port"], False), block=True)
            ranks.execute(
                "dist.init_process_group('gloo', store=store, rank=rank, world_size=world_size,"
                " timeout=timedelta(seconds=seconds))"
            )
            ranks.execute(f"import sys; sys.path.append({str(ROOT / 'notebooks')!r})")
            ranks.execute("import exercises; exercises.store = store")
            ranks.execute("from exercises import check, on_all_ranks")
    except BaseException:
        stop_ranks()
        raise
    finally:
        os.environ["COURSE_MARK"] = KERNEL
    _started = n, timeout
    _cells.clear()
    _define_px(ranks)
    print(f"{n} ranks are ready: {n} processes in one Gloo process group")


def stop_ranks() -> None:
    """End the processes of start_ranks(), also those that hang in a collective."""
    global _client
    if _client:
        _client.close(linger=0)
        _client = None
    end_processes(f"{KERNEL}/ranks")
    shutil.rmtree(FOLDER / "ranks", ignore_errors=True)


def gather(name: str) -> list:
    """The value of the variable `name` in each rank, in rank order. (ipyparallel sorts a dict.)"""
    if not _client:
        raise RuntimeError("there are no ranks: call start_ranks() first")
    if gone := _gone():
        raise RuntimeError(f"{gone} gone: call start_ranks({_started[0]}), then run the page again")
    return _client[:].pull(name, block=True)


@contextlib.contextmanager
def _saying(what, every: float = 20):
    """Print every 20 seconds what start_ranks() waits for. Not in pages that are saved or compared.

    what: a text, or a function that returns one.
    """
    over = threading.Event()

    def say():
        while not over.wait(every):
            print(f"waiting for {what() if callable(what) else what}", flush=True)

    if not os.environ.get("COURSE_QUIET"):
        threading.Thread(target=say, daemon=True).start()
    try:
        yield
    finally:
        over.set()


def _gone() -> str:
    """Such as "rank 0 is" or "rank 0 and 2 are"; "" if all ranks of start_ranks() are there."""
    gone = [str(rank) for rank in range(_started[0]) if rank not in _client.ids]
    return f"rank {' and '.join(gone)} {'is' if len(gone) == 1 else 'are'}" if gone else ""


def _define_px(ranks=None) -> None:
    """Put _px() in front of ipyparallel's %px and %%px, which know nothing of dead ranks."""
    from IPython import get_ipython

    shell = get_ipython()
    if ranks:
        ranks.activate()
        shell.run_line_magic("pxconfig", "--no-stream --progress-after -1")  # in rank order
        for kind, magics in shell.magics_manager.magics.items():
            _ipyparallel[kind] = magics["px"]
        # Otherwise ipyparallel keeps an interrupt to itself, and _px() does not hear of it.
        _ipyparallel["line"].__self__.signal_on_interrupt = None
    if shell:
        shell.register_magic_function(_px, "line_cell", "px")


def _px(line: str, cell: str | None = None) -> None:
    """Run a cell on the ranks. If that ends one, or leaves the ranks useless: start them again."""
    from IPython.core.error import UsageError  # is shown in one line
    from IPython.utils.capture import capture_output

    if not _client:
        raise UsageError("there are no ranks: call start_ranks() first")
    is_check = re.search(r"^check\(", cell or line, re.MULTILINE)
    trouble = ""
    try:
        if is_check:
            with capture_output() as said:
                _run(line, cell)
            print(said.stdout, end="")  # and not what libraries have logged
        else:
            _run(line, cell)
        if not (is_check and any(gather("exercises.start_again"))):
            if (line, cell) in _cells:
                _cells.remove((line, cell))
            if not (is_check and "not yet" in said.stdout):
                _cells.append((line, cell))
            return
    except (KeyboardInterrupt, Exception) as error:
        # ipyparallel raises an error of its own on the way out of an interrupt: no result is there.
        if KeyboardInterrupt in (type(error), type(error.__context__)):
            trouble = "interrupted"
        elif _gone():
            trouble = f"{_gone()} gone: this cell has ended the process"
        else:
            raise  # an error like any other
    _start_again()
    if trouble:
        trouble += f". {_started[0]} new ranks have run the cells before this one."
        if not is_check:
            raise UsageError(trouble)
        print("not yet: " + trouble)


def _run(line: str, cell: str | None) -> None:
    if cell is None:
        _ipyparallel["line"](line)
    else:
        _ipyparallel["cell"](line, cell)


def _start_again() -> None:
    """New ranks in place of those that are gone or wait for ever.

    The %%px cells of this page run on them again, so that they know what the old ones knew.
    """
    from IPython.utils.capture import capture_output

    cells = _cells.copy()
    with capture_output():
        start_ranks(*_started)
        for line, cell in cells:
            with contextlib.suppress(Exception):
                _run(line.replace("--local", ""), cell)
    _cells[:] = cells


def run_script(
    script, *args, ranks=2, timeout: float = 300, options=(), show=True, **environment: str
) -> str | None:
    """Run a script of this repository on `ranks` processes and print its output in rank order.

    script: a path, relative to the root of the repository. args: its arguments.
    ranks: 1 means plain `python`; more mean torchrun, with `options` of its own.
    show: False returns the output as text instead of printing it. environment: more variables.
    Raises RuntimeError with the end of the error output if the script fails, and TimeoutError after
    `timeout` seconds. Standard error (progress bars, warnings) is shown only then. No process of
    the job outlives the call.
    """
    mark = f"{KERNEL}/{uuid.uuid4().hex}"
    logs = FOLDER / "logs"
    command = [sys.executable, script, *args]
    if ranks > 1:
        torchrun = ("-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}")
        command[1:1] = [*torchrun, "--redirects=3", f"--log-dir={logs}", *options]
    logs.mkdir(parents=True)
    try:
        with open(logs / "stdout.log", "w") as out, open(logs / "stderr.log", "w") as err:
            code = subprocess.Popen(
                [str(part) for part in command],
                cwd=ROOT,
                env=os.environ | {"COURSE_MARK": mark, **environment},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,  # an interrupt reaches us alone: we end the job below
            ).wait(timeout)
    except subprocess.TimeoutExpired:
        code = None
    finally:
        end_processes(mark)
        # torchrun writes <job>/attempt_<restarts>/<rank>/stdout.log. Sorted by length first, so
        # that rank 10 comes after rank 9.
        files = sorted(logs.rglob("std*.log"), key=lambda file: (len(str(file)), str(file)))
        text = {"stdout": "", "stderr": ""}
        for file in files:
            said = file.read_text(errors="replace")  # a killed process may leave half a letter
            said = said.replace(f"{ROOT}{os.sep}", "").replace(sys.prefix, "...")
            # torchrun's own traceback says nothing: what counts is the table after it.
            text[file.stem] += said.rpartition("ChildFailedError:")[2]
        shutil.rmtree(logs)
    if code is None:
        raise TimeoutError(f"{script} did not end within {timeout} s\n" + text["stdout"][-2000:])
    if code != 0:
        end = (text["stdout"] + text["stderr"])[-3000:]
        raise RuntimeError(f"{script} failed with exit status {code}\n{end}")
    if not show:
        return text["stdout"]
    print(text["stdout"], end="")


guard = subprocess.Popen(
    [sys.executable, ROOT / "notebooks/processes.py", KERNEL],
    stdin=subprocess.PIPE,
    start_new_session=True,
)
os.environ["COURSE_MARK"] = KERNEL
os.environ.setdefault("OMP_NUM_THREADS", "1")  # one thread per rank: they share the cores
_define_px()
