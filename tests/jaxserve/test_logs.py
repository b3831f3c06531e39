"""Log lines for machines."""

import json
import logging
import subprocess
import sys

from jaxserve import logs
from jaxserve.logs import JsonFormatter, announce


def record(message: str, *arguments: object, **more: object) -> logging.LogRecord:
    made = logging.LogRecord("jaxserve.http", logging.INFO, "f.py", 1, message, arguments, None)
    made.__dict__.update(more)
    return made


def test_a_line() -> None:
    fields = {"request_id": 'a"\n', "status": 200}
    line = JsonFormatter().format(record("x=%d é", 3, created=0.5, fields=fields))
    assert "\n" not in line
    assert json.loads(line) == {
        "time": "1970-01-01T00:00:00.500+00:00",
        "level": "INFO",
        "logger": "jaxserve.http",
        "message": "x=3 é",
        "request_id": 'a"\n',
        "status": 200,
    }


def test_an_exception() -> None:
    try:
        raise KeyError("gone")
    except KeyError:
        line = JsonFormatter().format(record("failed", exc_info=sys.exc_info()))
    assert "KeyError: 'gone'" in json.loads(line)["error"]
    assert "\n" not in line


def test_what_is_announced_has_the_form_of_the_log(capsys, monkeypatch):
    fields = {"http": "127.0.0.1:8000", "lanes": 2}
    announce("ready", fields)
    assert capsys.readouterr().out == "ready  http=127.0.0.1:8000  lanes=2\n"
    monkeypatch.setattr(logs, "_form", "json")
    announce("ready", fields)
    assert json.loads(capsys.readouterr().out) == {"message": "ready", **fields}


def test_stacks_are_printed_at_a_signal_and_at_a_fatal_error() -> None:
    program = (
        "import os, signal; from jaxserve.logs import configure; configure('text'); "
        "os.kill(os.getpid(), signal.SIGUSR1); print('alive', flush=True); os.abort()"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60
    )
    assert ran.stdout == "alive\n"
    assert "Current thread" in ran.stderr.partition("Fatal Python error: Aborted")[0]
    assert 'File "<string>", line 1' in ran.stderr.partition("Fatal Python error: Aborted")[2]
