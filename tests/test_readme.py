"""Every README and page names only what exists: files, commands, make targets and keys."""

import importlib.util
import re
import subprocess
from pathlib import Path

import pytest

from jaxserve.config.load import known_keys

ROOT = Path(__file__).resolve().parent.parent
ROOMS = (
    *("jaxserve", "jaxserve/planner", "jaxserve/preflight", "jaxserve/roles", "jaxserve/server"),
    *("pallas_kernels", "configs", "launch"),
)
"""Every room with a README of its own."""
PAGES = ["CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md"]
PAGES = [name for name in PAGES if (ROOT / name).is_file()]
PAGES += sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("docs/**/*.md"))
READMES = {
    name: (ROOT / name).read_text(encoding="utf-8")
    for name in (
        "README.md",
        "examples/README.md",
        *(f"{room}/README.md" for room in ROOMS),
        *PAGES,
    )
}
CODE = re.compile(r"```.*?```", re.DOTALL)
PATH = re.compile(r"(?:[\w.-]+/)+(?:[\w.-]+\.[a-z]+)?|[\w.-]+\.toml|LICENSE|Makefile")
MODULE = re.compile(r"python -m ((?:jaxserve|pallas_kernels|tests)[\w.]*)")


def prose(text: str) -> str:
    return CODE.sub("", text)


def commands(text: str) -> str:
    return "\n".join(CODE.findall(text))


def each(pattern: re.Pattern[str], part=lambda text: text) -> list[tuple[str, str]]:
    """(README, what the pattern finds in this part of it), without repetitions."""
    found = {(name, hit) for name, text in READMES.items() for hit in pattern.findall(part(text))}
    return sorted(found)


PATHS = [
    (name, hit) for name, hit in each(re.compile(r"`([^`\n]+)`"), prose) if PATH.fullmatch(hit)
]


def anchors(text: str) -> set[str]:
    """GitHub's anchors of the headings of a page."""
    heads = re.findall(r"^#+ (.+)$", prose(text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head).lower().replace(" ", "-") for head in heads}


def test_links_between_pages_lead_somewhere() -> None:
    links = each(re.compile(r"\]\((?!https?:)([^)#]*)#?([^)]*)\)"), prose)
    assert len(links) > 20
    for name, (target, anchor) in links:
        path = ((ROOT / name).parent / target).resolve() if target else ROOT / name
        assert path.exists(), f"{name} links to {target}"
        assert not anchor or anchor in anchors(path.read_text(encoding="utf-8")), (name, anchor)


def test_paths_in_backticks_exist() -> None:
    """From the repository's root, or from the README's folder."""
    here = [(name, path) for name, path in PATHS if not (ROOT / path).exists()]
    assert [path for name, path in here if not (ROOT / name).parent.joinpath(path).exists()] == []


@pytest.mark.parametrize("name", ["README.md", "docs/architecture.md"])
def test_the_life_of_a_token_names_files(name: str) -> None:
    _, _, rest = READMES[name].partition("\n1. **Request.**")
    life = rest.partition("\n## ")[0]
    assert len(re.findall(r"^\d+\. \*\*", life, re.MULTILINE)) >= 8
    paths = [path for readme, path in PATHS if readme == name and f"`{path}`" in life]
    assert 8 <= len(paths) <= 14


def test_pages_are_short_and_the_first_leads_to_the_others() -> None:
    first = READMES["README.md"]
    assert first.count("\n") <= 150
    assert [room for room in ROOMS if f"`{room}/" not in first] == []
    assert [room for room in ROOMS if READMES[f"{room}/README.md"].count("\n") > 100] == []
    lines = [text.count("\n") for name, text in READMES.items() if "measurements/" not in name]
    assert sum(lines) <= 2000


def test_every_path_in_a_command_exists() -> None:
    pattern = re.compile(r"(?<![\w/.])(?:configs|launch|tests)/[\w./-]+")
    paths = list(each(pattern, commands))
    assert ("README.md", "configs/demo.yaml") in paths
    assert [hit for _, hit in paths if not (ROOT / hit).exists()] == []


def test_modules_in_commands_exist() -> None:
    modules = {hit for _, hit in each(MODULE)}
    assert len(modules) > 10
    assert [name for name in modules if importlib.util.find_spec(name) is None] == []


def test_make_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = {hit for _, hit in each(re.compile(r"(?:`|\n)make ([a-z]+)(?:`| {2,}| [A-Z])"))}
    assert {"test", "serve"} <= targets <= set(re.findall(r"^([a-z]+):", makefile, re.MULTILINE))


def test_every_key_in_an_example_or_in_backticks_is_one() -> None:
    examples = {hit for _, hit in each(re.compile(r"--set ([a-z_.]+)="), commands)}
    first = READMES["README.md"]
    examples |= set(re.findall(r'"([a-z_.]+)": ', first.partition("overrides={")[2].split("}")[0]))
    assert examples >= {"attention.dp", "lanes"}
    sections = {key.split(".")[0] for key in known_keys() if "." in key}
    quoted = {
        hit
        for _, hit in each(re.compile(r"`([a-z]+\.[a-z_]+)`"), prose)
        if hit.split(".")[0] in sections
    }
    assert quoted >= {"server.http_port", "attention.tp"}
    assert sorted((examples | quoted) - set(known_keys())) == []


def test_no_readme_is_forgotten() -> None:
    """Text files of packages are READMEs that this test knows, or data of tests."""
    run = subprocess.run(
        ["git", "ls-files", "*.md", ":!docs"], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    if run.returncode:
        pytest.skip("not a git checkout")
    assert {name for name in run.stdout.split() if not name.startswith("tests/")} <= set(READMES)
