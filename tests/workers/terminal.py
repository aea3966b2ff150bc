"""A user at a terminal: type lines into a shell, each when its text is seen; close the terminal.

    terminal.py '[["$ ", "ls"], ["README.md", ""]]'

A text is looked for on the screen, after the text before it, and in training.log of this folder.
The screen's text is printed. Python's pty is the terminal: to close it ends the shell as the
end of ssh does, by SIGHUP.
"""

import json
import os
import pty
import select
import sys
from pathlib import Path

LOG = Path("training.log")


def main() -> None:
    shell, screen = pty.fork()
    if shell == 0:
        os.environ |= {"PS1": "ready> ", "TERM": "dumb"}
        os.execvp("bash", ["bash", "--norc", "-i"])
    for text, line in json.loads(sys.argv[1]):
        wait_for(text, screen)
        os.write(screen, f"{line}\n".encode())


def wait_for(text: str, screen: int) -> None:
    shown = ""
    while text not in shown and not (LOG.exists() and text in LOG.read_text()):
        if select.select([screen], [], [], 0.1)[0]:
            shown += os.read(screen, 1).decode(errors="replace")
            print(shown[-1], end="", flush=True)


if __name__ == "__main__":
    main()
