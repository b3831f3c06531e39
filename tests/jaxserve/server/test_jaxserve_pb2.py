"""The committed stubs are those of the committed .proto."""

import re
from pathlib import Path

import pytest
from grpc_tools import protoc

ROOT = Path(__file__).resolve().parents[3]
PROTO = "jaxserve/server/jaxserve.proto"


def without_versions(source: str) -> str:
    """The source as any version of the generator writes it."""
    source = re.sub(r"(Python Version: ).*", r"\1", source)
    return re.sub(r"(Domain\.PUBLIC,)\s+\d+,\s+\d+,\s+\d+,", r"\1", source)


@pytest.mark.parametrize("stub", ["jaxserve_pb2.py", "jaxserve_pb2.pyi"])
def test_stubs_are_up_to_date(tmp_path: Path, stub: str) -> None:
    outputs = [f"--{kind}_out={tmp_path}" for kind in ("python", "pyi")]
    assert protoc.main(["protoc", f"-I{ROOT}", *outputs, str(ROOT / PROTO)]) == 0
    fresh = (tmp_path / "jaxserve/server" / stub).read_text()
    committed = (ROOT / "jaxserve/server" / stub).read_text()
    assert without_versions(committed) == without_versions(fresh)
