"""Certificates for tests: an authority, a server's and a client's, made by openssl."""

import shutil
import subprocess
from pathlib import Path

import pytest


def make(folder: Path) -> Path:
    """`ca.pem`, `server.pem`, `server.key`, `client.pem`, `client.key` in the folder."""
    if shutil.which("openssl") is None:
        pytest.skip("no openssl to make certificates with")

    def run(*arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True)

    curve = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    run(
        *("req", "-x509", *curve, "-keyout", "ca.key", "-out", "ca.pem", "-days", "2"),
        *("-subj", "/CN=test ca"),
    )
    (folder / "names").write_text("subjectAltName=DNS:localhost,IP:127.0.0.1")
    for name in ("server", "client"):
        run(
            *("req", *curve, "-keyout", f"{name}.key", "-out", f"{name}.csr"),
            *("-subj", f"/CN={name}"),
        )
        run(
            *("x509", "-req", "-in", f"{name}.csr", "-CA", "ca.pem", "-CAkey", "ca.key"),
            *("-out", f"{name}.pem", "-days", "2", "-extfile", "names"),
        )
    return folder
