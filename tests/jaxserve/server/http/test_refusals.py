"""Wrong fields of every path: the error names the field, and the engine sees no request."""

import json
import re

from tests import golden
from tests.jaxserve.server.http.rig import HttpRig


def test_a_bad_field_is_named(wide: HttpRig) -> None:
    """`golden/server/refusals.txt` lists paths with fields; x{9} stands for nine letters."""

    def said(mistake: str) -> str:
        path, fields = mistake.split(" ", 1)
        fields = re.sub(r"x\{(\d+)\}", lambda match: "x" * int(match[1]), fields)
        error = wide.refused(path, **json.loads(fields))
        assert error["code"] == "invalid_value"
        assert error["message"].startswith(f"{error['param']}: ")
        assert wide.engine.prompts == []
        return error["message"]

    golden.check_each("server/refusals.txt", said)
