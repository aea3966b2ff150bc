"""What the chapters share: ranks that stay alive between cells, and scripts under torchrun.

start_ranks(2)    two processes that wait for %%px cells, joined in one Gloo process group
gather("x")       what each rank calls `x`: a list in rank order
stop_ranks()      end the processes; the end of the kernel, of whatever kind, does that too
run_script("ddp_basics/train.py", "--epochs", 2, ranks=2)    runs a script of this repository
check(right, answer)    whether an exercise is solved: see exercises.py. Pictures: see figures/.
"""

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path

import psutil
from exercises import check as check  # for the chapters

ROOT = Path(__file__).resolve().parent.parent
KERNEL = uuid.uuid4().hex  # marks, in the environment, every process that this kernel starts
FOLDER = Path(tempfile.gettempdir(), f"course_{KERNEL}")  # temporary files
_client = None  # ipyparallel's connection to the ranks, while there are any


def start_ranks(n: int = 2, timeout: float = 20) -> None:
    """Start `n` processes, one per rank, for %%px cells; ranks that ran before are ended first.

    Each has `torch`, `dist` (torch.distributed), `rank`, `world_size`, `check`, and is a member of
    a Gloo process group. A collective that waits over `timeout` seconds for another rank raises;
    the group is then broken: call start_ranks() again.
    """
    global _client
    import ipyparallel
    from IPython import get_ipython

    stop_ranks()
    os.environ["COURSE_MARK"] = f"{KERNEL}/ranks"
    profile = f"--profile-dir={FOLDER / 'ranks'}"
    cluster = ipyparallel.Cluster(
        profile_dir=str(FOLDER / "ranks"), log_level=50, shutdown_atexit=False
    )
    try:
        cluster.start_controller_sync()
        patience = "--IPEngine.wait_for_url_file=600"  # for the controller's address
        ranks = [ROOT / "notebooks/ranks.py", str(n), profile, f"--cluster-id={cluster.cluster_id}"]
        with open(FOLDER / "ranks.log", "ab") as log:  # what they say beside the page
            started = subprocess.Popen(
                [sys.executable, *ranks, patience], stdout=log, stderr=log, start_new_session=True
            )
        _client = cluster.connect_client_sync()
        while len(_client.ids) < n:  # however long it takes a busy machine to import PyTorch
            if started.poll() is not None:
                said = (FOLDER / "ranks.log").read_text()[-2000:]
                raise RuntimeError(f"the ranks have ended before they were ready:\n{said}")
            time.sleep(0.05)
        ranks = _client[:]
        ranks.block = True  # before activate(), or %%px would not wait for the ranks
        ranks.scatter("rank", range(n), flatten=True)
        ranks.push({"world_size": n, "seconds": timeout})
        ranks.execute("import torch, torch.distributed as dist; from datetime import timedelta")
        ranks.execute(f"import sys; sys.path.append({str(ROOT / 'notebooks')!r})")
        ranks.execute("from exercises import check")
        # Ranks find each other in a store, which rank 0 serves on whatever port is free.
        store = "store = dist.TCPStore('127.0.0.1', {}, is_master={}, wait_for_workers=False)"
        _client[0].execute(store.format(0, True) + "; port = store.port", block=True)
        if n > 1:
            _client[1:].execute(store.format(_client[0]["port"], False), block=True)
        ranks.execute(
            "dist.init_process_group('gloo', store=store, rank=rank, world_size=world_size,"
            " timeout=timedelta(seconds=seconds))"
        )
    except BaseException:
        stop_ranks()
        raise
    finally:
        os.environ["COURSE_MARK"] = KERNEL
    ranks.activate()  # defines %%px
    get_ipython().run_line_magic("pxconfig", "--no-stream --progress-after -1")  # in rank order
    print(f"{n} ranks are ready: {n} processes in one Gloo process group")


def stop_ranks() -> None:
    """End the processes of start_ranks(), also those that hang in a collective."""
    global _client
    if _client:
        _client.close(linger=0)
        _client = None
    end_processes(f"{KERNEL}/ranks")
    shutil.rmtree(FOLDER / "ranks", ignore_errors=True)
    if "IPython" in sys.modules and (shell := sys.modules["IPython"].get_ipython()):
        shell.register_magic_function(no_ranks, "line_cell", "px")  # until the next activate()


def no_ranks(line: str = "", cell: str = "") -> None:
    raise RuntimeError("there are no ranks: call start_ranks() first")


def gather(name: str) -> list:
    """The value of the variable `name` in each rank, in rank order. (ipyparallel sorts a dict.)"""
    if not _client:
        no_ranks()
    return _client[:].pull(name, block=True)


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


def end_processes(mark: str) -> None:
    """Kill the processes whose mark begins with `mark`.

    By mark and not by parent: a killed torchrun leaves its workers without one.
    """
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):  # gone, or another user's
            if process.environ().get("COURSE_MARK", "").startswith(mark):
                process.kill()
                found.append(process)
    psutil.wait_procs(found, timeout=10)


if __name__ == "__main__":  # this is the guard, started below
    sys.stdin.read()  # returns once the kernel is gone
    end_processes(KERNEL := sys.argv[1])
    shutil.rmtree(Path(tempfile.gettempdir(), f"course_{KERNEL}"), ignore_errors=True)
else:
    # A kernel that is killed runs no clean-up of its own, but its end of this pipe closes.
    guard = subprocess.Popen(
        [sys.executable, __file__, KERNEL], stdin=subprocess.PIPE, start_new_session=True
    )
    os.environ["COURSE_MARK"] = KERNEL
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # one thread per rank: they share the cores
