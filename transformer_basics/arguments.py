"""Parse the command line of a rank: check each value, print help and errors once per node.

parser = ArgumentParser(description="...")
parser.add_argument("--steps", type=at_least(1), default=100)
"""

import argparse
import errno
import json
import math
import os
import re
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import torch

ACCELERATOR = torch.accelerator.current_accelerator()  # of this build of torch; None: CPUs only
DEVICES = ("auto", "cpu", ACCELERATOR.type if ACCELERATOR else "cuda")  # choices of --device
DEVICE_HELP = "auto: this node's accelerators, one per rank; the CPU if the node has none"


class UserError(ValueError):
    """A mistake of the user, reported as one sentence without a traceback."""

    status = 2  # the program's exit status: another try would fail, too


class DiskError(UserError):
    """A disk that is full or does not answer during a run: another try may succeed."""

    status = 1


def disk_error(what: str, error: OSError) -> UserError:
    """The error to raise if `what` failed: DiskError, unless the path is wrong or forbidden."""
    wrong = isinstance(error, (PermissionError, NotADirectoryError, FileExistsError))
    kind = UserError if wrong or error.errno == errno.EROFS else DiskError
    return kind(f"{what}: {error.strerror}")


class ArgumentParser(argparse.ArgumentParser):
    """argparse that prints errors and --help once per node.

    --help shows each default, and the commands of the script's docstring.
    """

    def __init__(self, **settings):
        docstring = sys.modules["__main__"].__doc__ or ""
        commands = re.findall(r"^ {4,}\S.*", docstring, re.MULTILINE)
        epilog = "\n".join(["examples:", *commands]) if commands else None
        # Flags are written out: a script that looks for --output-dir would not see --output.
        own = {"epilog": epilog, "formatter_class": HelpFormatter, "allow_abbrev": False}
        super().__init__(**own | settings)

    def error(self, message: str) -> NoReturn:
        fail(message.removeprefix("argument "))

    def print_help(self, file=None) -> None:
        if os.environ.get("LOCAL_RANK", "0") == "0":
            super().print_help(file)

    def make_folder(self, flag: str, folder: Path | None) -> None:
        """Make the folder that `flag` names, if any; if that fails, end with an error."""
        if folder is None:
            return
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            self.error(f"{flag} {folder} cannot be made: {error.strerror}")


class HelpFormatter(argparse.RawTextHelpFormatter):
    """Adds each default to its text; names a value N (integer), X (number) or PATH."""

    # argparse's own formatters override these two methods; there is no public way.
    def _get_help_string(self, action: argparse.Action) -> str:
        takes_value = action.option_strings and action.nargs != 0 and not action.required
        if not takes_value or not action.help or "default" in action.help:
            return action.help
        default = "none" if action.default is None else "%(default)s"
        return f"{action.help} (default: {default})"

    # there is no public way
    def _get_default_metavar_for_optional(self, action: argparse.Action) -> str:
        kind = getattr(action.type, "kind", action.type)
        kinds = {int: "N", float: "X", Path: "PATH"}
        return kinds.get(kind) or action.dest.upper()


def fail(message: str, status: int = UserError.status) -> NoReturn:
    """Print `message` once per node and exit with `status`.

    Every rank finds the same mistake, and local rank 0 prints it. The other ranks wait until
    torchrun stops them: if one exited first, torchrun could stop local rank 0 before it prints.
    """
    if os.environ.get("LOCAL_RANK", "0") != "0":
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        time.sleep(30)
    # In one piece: other nodes may write to the same log.
    sys.stderr.write(f"{Path(sys.argv[0]).name}: error: {message}\n")
    tell_torchrun(message)
    sys.exit(status)


def tell_torchrun(message: str) -> None:
    """Put `message` at the end of torchrun's error report."""
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if file:  # the format of @record, without a traceback
        about = {"message": message, "extraInfo": {"timestamp": int(time.time())}}
        Path(file).write_text(json.dumps({"message": about}))


# Types for add_argument: each returns a function that parses a text, or says what it must be.


def at_least(least: int) -> Callable[[str], int]:
    """An integer that is not below `least`."""
    return _number(int, lambda value: value >= least, f"an integer of at least {least}")


def above(limit: float) -> Callable[[str], float]:
    """A finite number greater than `limit`."""
    return _number(float, lambda value: limit < value < math.inf, f"a number above {limit:g}")


def between(least: float, most: float) -> Callable[[str], float]:
    """A number from `least` to `most`, both included; `most` may be infinite."""
    says = f"from {least:g} to {most:g}" if most < math.inf else f"of at least {least:g}"
    return _number(float, lambda value: least <= value <= most, f"a number {says}")


def _number(kind: type, is_right: Callable, says: str) -> Callable:
    def read(text: str):
        try:
            value = kind(text)
        except ValueError:
            value = None
        if value is None or not is_right(value):
            raise argparse.ArgumentTypeError(f"must be {says}, not {text}")
        if kind is int and value >= 2**63:  # tensors and generators take 64 bits
            raise argparse.ArgumentTypeError(f"must be below 2^63, not {text}")
        return value

    read.kind = kind
    return read
