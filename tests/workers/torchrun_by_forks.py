"""torchrun whose ranks are forks of it: the options of torchrun, a script, its arguments."""

import sys
from pathlib import Path

from torch.distributed.run import main

script = next(word for word in sys.argv[1:] if word.endswith(".py"))
sys.path[0] = str(Path(script).resolve().parent)  # where the ranks look for their modules
main(["--run-path", "--start-method=fork", *sys.argv[1:]])
