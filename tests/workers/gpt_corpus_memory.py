"""What a corpus costs a process that does nothing else. Arguments: folders; a line of JSON each."""

import json
import sys
import tracemalloc
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "transformer_basics"))

import data
import psutil
from data import Batches
from runtime import distributed_worker

data.MOST_CHECKED = 0  # of a test's zeros the checksum would be wrong

with distributed_worker("cpu") as worker:
    for folder in sys.argv[1:]:
        resident = psutil.Process().memory_info().rss
        tracemalloc.start()
        corpus = data.load_corpus([Path(folder)], None, worker)
        batches = Batches(corpus.train, 2048, 16, seed=0)
        for step in (0, 1, 3 * batches.per_epoch):
            assert batches.get(step, 0, 1)[0].shape == (16, 2048)
        python_bytes = tracemalloc.get_traced_memory()[1]  # at the peak
        tracemalloc.stop()
        grown = psutil.Process().memory_info().rss - resident
        print(json.dumps([batches.windows.count, python_bytes, grown]))
