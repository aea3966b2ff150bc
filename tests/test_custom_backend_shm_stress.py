"""custom_backend/shm: random operations on random groups equal Gloo's; legal orders of calls end.

REPEAT=7 runs more than 10,000 operations.
"""

import pool
import pytest
from helpers import REPEAT, ROOT

WORKERS = ROOT / "tests" / "workers"
OPERATIONS = 500


@pytest.mark.parametrize(("ranks", "seed"), [(2, 1), (3, 2), (4, 3)])
@pytest.mark.timeout(120 + 120 * REPEAT)
@pytest.mark.slow
def test_random_operations_equal_gloo(ranks, seed):
    count = OPERATIONS * REPEAT
    result = pool.run(
        WORKERS / "shm_stress.py", seed, count, ranks=ranks, timeout=60 + 120 * REPEAT
    )
    assert f"{count} operations in groups of" in result.check().output


@pytest.mark.timeout(60 + 30 * REPEAT)
def test_legal_orders_of_calls_end():
    for _ in range(REPEAT):
        result = pool.run(WORKERS / "shm_orders.py", ranks=2).check()
        assert result.output.count(" ms\n") == 7
