"""A process that was started with a lower priority takes its own when it serves."""

import subprocess
import sys

CODE = """
import os, threading
from pathlib import Path
from jaxserve.commands.priority import take_serving_priority

def levels():
    tasks = Path("/proc/self/task").iterdir()
    return {os.getpriority(os.PRIO_PROCESS, int(task.name)) for task in tasks}

own = os.nice(0)
os.setsid()
group = Path("/proc/self/autogroup")
if group.exists() and os.geteuid() == 0:  # others may have to wait
    group.write_text("3")
os.nice(3)
end = threading.Event()
threading.Thread(target=end.wait).start()
environment = {"JAXSERVE_SERVING_NICE": f"{own + LESS}"}
take_serving_priority({})
print([level - own for level in levels()])
take_serving_priority(environment)
print([level - own for level in levels()], environment)
print(not group.exists() or group.read_text().split()[-1] == "0")
end.set()
"""


def test_all_threads_take_it():
    # One that is higher than at the start needs no privilege.
    code = CODE.replace("LESS", "5")
    found = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert found.stdout.splitlines() == ["[3]", "[5] {}", "True"]
