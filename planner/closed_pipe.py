"""End a script quietly when the program that reads its output ends first: plan.py ... | head."""

import contextlib
import os
import sys


@contextlib.contextmanager
def quiet_if_closed():
    """A decorator of main(): a closed pipe ends the script with status 1 and no traceback.

    Signals keep their defaults: SIG_DFL for SIGPIPE would also end scripts that write to sockets.
    The remedy is that of Python's documentation, module signal, "Note on SIGPIPE".
    """
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        # At exit Python flushes stdout once more: let it write to nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
