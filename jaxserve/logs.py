"""Log lines: for people, or one JSON object each for machines.

Called by `serve.py` once, before anything logs. A record with `fields` (the access log's) keeps
them as keys of its object.
"""

import datetime
import faulthandler
import json
import logging
import signal
import sys
from collections.abc import Mapping

TEXT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


class JsonFormatter(logging.Formatter):
    """A record as one line of JSON."""

    def format(self, record: logging.LogRecord) -> str:
        """`time`, `level`, `logger`, `message`, the record's own fields, `error` if any."""
        when = datetime.datetime.fromtimestamp(record.created, datetime.UTC)
        line = {
            "time": when.isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)


_form = "text"


def configure(form: str) -> None:
    """Sets up the root logger; `form` is "text" or "json".

    Also prints the stacks of all threads at a fatal error, and at SIGUSR1.
    """
    global _form
    _form = form
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter() if form == "json" else logging.Formatter(TEXT))
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    assert sys.__stderr__ is not None
    faulthandler.enable(sys.__stderr__)
    faulthandler.register(signal.SIGUSR1, sys.__stderr__)


def announce(event: str, fields: Mapping[str, object]) -> None:
    """Prints an event on standard output for processes that wait for it, in the form of the log:
    `event  name=value  ...`, or one JSON object with `message` and the fields."""
    if _form == "json":
        line = json.dumps({"message": event, **fields}, ensure_ascii=False, default=str)
    else:
        line = "  ".join([event, *(f"{name}={value}" for name, value in fields.items())])
    print(line, flush=True)
