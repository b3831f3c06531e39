"""Models by their id, from a server that answers as the Hugging Face Hub does."""

import functools
import http.server
import json
import threading

import huggingface_hub.constants
import pytest

from jaxserve.config.command_line import read_deployment
from jaxserve.config.load import load_deployment
from jaxserve.errors import ConfigError
from jaxserve.storage.hub import hub_folder

FILES = {"config.json": b"{}", "model.safetensors": b"weights", "pytorch_model.bin": b"again"}
COMMIT = "0123456789abcdef0123456789abcdef01234567"
FOUND: list[str] = []
"""Paths of answers, in their order."""


class Handler(http.server.SimpleHTTPRequestHandler):
    """Serves files whose paths are those of the Hub's API."""

    def log_request(self, code="-", size="-"):
        FOUND.extend([self.path.partition("?")[0]] * (code == http.HTTPStatus.OK))

    def log_error(self, *_): ...

    def end_headers(self):
        self.send_header("ETag", f'"{self.path.rpartition("/")[2]}"')
        self.send_header("X-Repo-Commit", COMMIT)
        super().end_headers()


@pytest.fixture
def hub(monkeypatch, tmp_path):
    files = {f"maker/model/resolve/{COMMIT}/{name}": data for name, data in FILES.items()}
    listed = {"id": "maker/model", "sha": COMMIT, "siblings": [{"rfilename": n} for n in FILES]}
    files["api/models/maker/model/revision/main"] = json.dumps(listed).encode()
    tree = [{"type": "file", "path": n, "size": len(FILES[n]), "oid": COMMIT} for n in FILES]
    files[f"api/models/maker/model/tree/{COMMIT}"] = json.dumps(tree).encode()
    for name, data in files.items():
        path = tmp_path / "hub" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    handler = functools.partial(Handler, directory=tmp_path / "hub")
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        url = f"http://127.0.0.1:{server.server_port}"
        template = url + "/{repo_id}/resolve/{revision}/{filename}"
        for name, value in (
            ("ENDPOINT", url),
            ("HUGGINGFACE_CO_URL_TEMPLATE", template),
            ("HF_HUB_CACHE", str(tmp_path / "cache")),
        ):
            monkeypatch.setattr(huggingface_hub.constants, name, value)
        monkeypatch.chdir(tmp_path)
        FOUND.clear()
        yield server
        server.shutdown()
        thread.join(10)


def test_a_model_is_downloaded_once_and_without_files_that_nobody_reads(hub):
    folder = hub_folder("maker/model")
    assert {file.name for file in folder.iterdir()} == {"config.json", "model.safetensors"}
    assert (folder / "model.safetensors").read_bytes() == b"weights"
    assert load_deployment("maker/model").model == str(folder.resolve())
    assert read_deployment(None, "maker/model").model == str(folder.resolve())
    weights = [path for path in FOUND if path.endswith((".safetensors", ".bin"))]
    assert set(weights) == {f"/maker/model/resolve/{COMMIT}/model.safetensors"}
    assert len(weights) <= 2  # HEAD and GET


def test_a_model_that_the_hub_does_not_have(hub):
    with pytest.raises(
        ConfigError, match=r"^maker/nothing: no such folder, and its download .*'404 "
    ):
        hub_folder("maker/nothing")
    hub.shutdown()
    hub.server_close()
    with pytest.raises(ConfigError, match=r"^maker/other: no such folder, and its download from"):
        hub_folder("maker/other")


@pytest.mark.parametrize("name", ["demo", "configs/demo.yaml", "/maker/model", "a/b/c", "a/b.yaml"])
def test_names_that_are_no_ids(name, hub, tmp_path):
    (tmp_path / "configs").mkdir()
    assert hub_folder(name) is None
    assert FOUND == []
