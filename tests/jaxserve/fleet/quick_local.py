"""`launch/local.py` that is quick to end what does not listen.

Tests stop processes, which nothing but SIGKILL ends then; the launcher would wait for that at
leisure. The first argument: seconds that followers have after the leader's end; then come the
launcher's own.
"""

import sys
from pathlib import Path

LAUNCH = Path(__file__).resolve().parents[3] / "launch"


def main() -> int:
    sys.path.insert(0, str(LAUNCH))
    import local
    import processes

    local.FOLLOWER_SECONDS = float(sys.argv[1])
    local.STOP_SECONDS = processes.STOP_SECONDS = 1.0
    return local.main(sys.argv[2:])


if __name__ == "__main__":
    sys.exit(main())
