"""The local launcher, quick to end what does not listen.

Tests stop processes, which nothing but SIGKILL ends then; the launcher would wait for that at
leisure. The first argument: seconds that followers have after the leader's end; then come the
launcher's own.
"""

import sys

from jaxserve.launch.local import __main__ as local
from jaxserve.launch.local import children

if __name__ == "__main__":
    local.FOLLOWER_SECONDS = float(sys.argv[1])
    children.STOP_SECONDS = 1.0
    sys.exit(local.main(sys.argv[2:]))
