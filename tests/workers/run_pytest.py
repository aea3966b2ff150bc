"""pytest with these arguments, in a fork: it need not import PyTorch."""

import sys

import pytest

status = pytest.main(sys.argv[1:])
helpers = sys.modules.get("helpers")  # of conftest.py
for keeper in helpers.KEEPERS.values() if helpers else ():
    # A fork ends without what atexit has noted. To wait for them also counts their processor time.
    keeper.connection.close()
    keeper.process.wait()
sys.exit(status)
