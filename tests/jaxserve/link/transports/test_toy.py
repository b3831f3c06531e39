"""A new transport is one file: configuration, links and `doctor` find it by its declaration."""

from pathlib import Path

from tests import golden
from tests.conftest import REPOSITORY
from tests.jaxserve.fleet.launched import output_of

TOYS = {name: golden.text(f"link/{name}_transport.txt") for name in ("toy", "far")}
USE = golden.text("link/use_of_toys.txt")


def overlay(folder: Path, *parts: str) -> Path:
    """A copy of the package that links to every file, with a real folder `parts` in it."""
    source, target = REPOSITORY.joinpath(*parts), folder.joinpath(*parts)
    if len(parts) > 1:
        overlay(folder, *parts[:-1])
        target.unlink()
    target.mkdir(parents=True)
    for path in source.iterdir():
        if path.name != "__pycache__":
            (target / path.name).symlink_to(path)
    return target


def test_a_transport_is_one_file(tmp_path):
    folder = overlay(tmp_path, "jaxserve", "link", "transports")
    for name, text in TOYS.items():
        (folder / f"{name}.py").write_text(text)
    new = {path.name for path in tmp_path.rglob("*.py") if not path.is_symlink()}
    assert new == {"toy.py", "far.py"}
    environment = {"PYTHONPATH": f"{tmp_path}:{REPOSITORY}", "PYTHONDONTWRITEBYTECODE": "1"}
    environment |= {"JAX_NUM_CPU_DEVICES": "2", "JAX_PLATFORMS": "cpu"}
    assert output_of("-c", USE, cwd=tmp_path, **environment) == "served\n"
