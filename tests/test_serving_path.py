"""How much code a process of each role can reach, and what none must reach.

Counted are the modules of `jaxserve` that a module imports, directly or through others, at the top
of a module or inside a function, but not under `if TYPE_CHECKING`; without `jaxserve.server` (the
faces) and without `pallas_kernels`, which is a package of its own. A line counts if it holds code:
blank lines, comments and docstrings do not.
"""

import ast
import functools
import io
import tokenize
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from jaxserve.checkpoint.families import FAMILIES
from jaxserve.checkpoint.opening import READERS
from jaxserve.fleet.pages_link import ENDS
from jaxserve.roles.pipelines import PIPELINES
from tests import golden

ROOT = Path(__file__).resolve().parent.parent
ASSEMBLY = "jaxserve.fleet.assembly"
RUNTIMES = {"whole_runtime", "domain_runtime"}
TIER = "check_tier", "with_host_tier"
CHOICES = {"lead", "with_peers", "own_experts", *TIER, "led_pages"} | RUNTIMES
"""Functions of the assembly that some parts call and others do not."""
INSIDE = "link.transports.device_put", "link.transports.ppermute"
BETWEEN = ("link.transports.pull",)
"""Transports, which are imported by name."""
FILES = {name: f"roles.{place.partition(':')[0]}" for name, place in PIPELINES.items()}
SPECS, MATHS = "jaxserve.config.attention", "jaxserve.model.attention"
"""Folders with a file for each kind of attention, of the same name in both."""
OWN_ENDS = [end.partition(":")[0].removeprefix("jaxserve.") for end in ENDS.values()]
"""Ends of the pages link, which are imported by name: a worker of a fleet has the one of its
role."""
WHOLE, SPLIT = ("colocated",), tuple(FILES.keys() - {"colocated"})
MORE = "engine.spread", "model.attention.exchanged_pages", "engine.step_policies"
LEADS, ALONE = ("open_engine", "own_experts"), ("with_peers", "fleet.here")
PARTS = {
    "leader, colocated": (14_800, *LEADS, "lead", "whole_runtime"),
    "leader, attention and ffn": (15_580, *LEADS, "lead", "whole_runtime"),
    "follower, attention and ffn": (11_420, "open_follower", "whole_runtime", "fleet.following"),
    "alone, colocated": (14_700, *LEADS, *ALONE, "whole_runtime"),
    "alone, attention and ffn": (15_480, *LEADS, *ALONE, "whole_runtime"),
    "attention": (13_140, "open_engine", "domain_runtime", *BETWEEN),
    "ffn": (10_800, "fleet.ffn_runtime", *BETWEEN),
    "router": (3_360, "fleet.router"),
    "serve": (28_250, "serve", *BETWEEN),
    "alone, with host pages": (15_710, *LEADS, *ALONE, *TIER, "whole_runtime"),
    "leader, with host pages": (15_990, *LEADS, "lead", *TIER, "led_pages", "whole_runtime"),
    "attention, of shards": (
        13_300,
        "open_engine",
        "domain_runtime",
        "fleet.shard_links",
        *BETWEEN,
    ),
    "ffn, a shard": (10_860, "fleet.ffn_runtime", "fleet.ffn_shard", *BETWEEN),
    "ffn, with TLS": (10_830, "fleet.ffn_runtime", "link.session.tls", *BETWEEN),
    "leader, with spread prompts and drafts": (15_000, *LEADS, "lead", *MORE, "whole_runtime"),
}
"""Most lines of code, and functions of the assembly, or modules, by the part that a process plays:
process 0 of a runtime of either mode, with the engine; the other processes of one; the only process
of a runtime, which may have its weights from running workers; a runtime of one role over `pull`; a
router; the command that can be any of these, with text/; the only process of a runtime with
`cache.host_gb`, and the first of several; the roles over `pull` where ffn workers share the
experts; any with TLS; the first of several with `scheduler.spread` and drafts."""
RUNS = {
    part: SPLIT if "and ffn" in part else WHOLE for part in PARTS if "whole_runtime" in PARTS[part]
} | {"serve": (*WHOLE, *SPLIT)}
"""Pipelines, which are imported by name, by part; a process runs one of them. `layer` alone has
transports, of which a process opens the one of `link.transport`."""


SILENT = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}


def source_of(module: str) -> Path | None:
    base = ROOT.joinpath(*module.split("."))
    return next((p for p in (base.with_suffix(".py"), base / "__init__.py") if p.is_file()), None)


def imported_names(tree: ast.AST) -> Iterator[str]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        yield from imported_names(node)


@functools.cache
def read(path: Path) -> tuple[str, tuple[str, ...]]:
    """A module's text, and what it imports."""
    text = path.read_text(encoding="utf-8")
    return text, tuple(imported_names(ast.parse(text)))


def assembly(*starts: str) -> str:
    """The assembly's source without the functions that a part starting at these never calls."""
    text = (source_of(ASSEMBLY) or ROOT).read_text(encoding="utf-8")
    defined = {
        node.name: node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)
    }
    called, waiting = set(), set(starts)
    while waiting:
        called.add(name := waiting.pop())
        used = {node.id for node in ast.walk(defined[name]) if isinstance(node, ast.Name)}
        waiting |= (used & set(defined)) - CHOICES - called
    lines = text.splitlines(keepends=True)
    for name in defined.keys() - called:
        node = defined[name]
        start = min([node, *node.decorator_list], key=lambda part: part.lineno).lineno
        lines[start - 1 : node.end_lineno] = ["\n"] * ((node.end_lineno or start) - start + 1)
    return "".join(lines)


def closure(*starts: str, **found: str) -> dict[str, str]:
    """Source text by module, of everything of this repository that these can import.

    Args:
      found: modules whose imports are among the starts.
    """
    waiting = list(starts)
    while waiting:
        parts = waiting.pop().split(".")
        for end in range(1, len(parts) + 1):
            module = ".".join(parts[:end])
            path = source_of(module)
            if path is None or module in found:
                continue
            found[module], imported = read(path)
            waiting += imported
    return found


@functools.cache
def code_lines(text: str) -> int:
    docstrings: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            docstrings.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in SILENT:
            lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines - docstrings)


SAMPLE = golden.text("code_lines.txt")


def test_code_lines() -> None:
    assert code_lines(SAMPLE) == 6


def test_imported_names() -> None:
    text = "import a.b\nif TYPE_CHECKING:\n    import c\ndef f():\n    from d import e, f as g\n"
    assert list(imported_names(ast.parse(text))) == ["a.b", "d.e", "d.f"]


def with_own_model(found: dict[str, str]) -> dict[str, str]:
    """Adds the reader of a model's folder, and a model's family with the kinds of attention whose
    specs the family makes: those with the most code. A process imports those of its own model."""
    if "jaxserve.checkpoint.opening" in found:
        readers = (at.partition(":")[0] for at in READERS.values())
        found = most(closure(f"jaxserve.checkpoint.{reader}", **found) for reader in readers)
    if "jaxserve.checkpoint.families" not in found:
        kinds = {path.stem for path in ROOT.joinpath(*SPECS.split(".")).glob("[!_]*.py")}
        known = f"{MATHS}.family" in found
        return most([closure(f"{MATHS}.{kind}", **found) for kind in kinds] if known else [found])
    return most(
        closure(family, *_kinds(family, found), **found)
        for family in {f"jaxserve.checkpoint.{at.partition(':')[0]}" for at in FAMILIES.values()}
    )


def _kinds(family: str, found: dict[str, str]) -> Iterator[str]:
    """The modules of a family's attention, if this part computes attention: of the specs that the
    family's file names, or else a file that it builds on."""
    if f"{MATHS}.family" not in found:
        return
    own = [family, *(closure(family, **found).keys() - found.keys())]
    used = ({*read(path)[1]} for one in own if (path := source_of(one)))
    named = ([name for name in names if name.startswith(SPECS)] for names in used)
    # Others have grouped-query attention, which `checkpoint/source.py` describes.
    for name in next(filter(None, named), [f"{SPECS}.gqa.GQA"]):
        yield f"{MATHS}.{name.split('.')[3]}"


def reach(part: str) -> dict[str, str]:
    """Source text by module, of everything that a process which plays this part can import: of
    pipelines, readers of folders and model families, which are imported by name, the ones with the
    most code."""
    wanted = PARTS[part][1:]
    modules = [f"jaxserve.{start}" for start in wanted if source_of(f"jaxserve.{start}")]
    found: dict[str, str] = {}
    if len(modules) < len(wanted):
        text = assembly(*(start for start in wanted if f"jaxserve.{start}" not in modules))
        found, modules = {ASSEMBLY: text}, [*modules, *imported_names(ast.parse(text))]
    found = most(
        closure(*modules, *(f"jaxserve.{start}" for start in starts), **found)
        for name in RUNS.get(part, [""])
        for transport in (INSIDE if name == "layer" else [""])
        for end in (OWN_ENDS if part == "serve" else [""])
        for starts in [filter(None, (FILES.get(name), transport, end))]
    )
    return with_own_model(found)


def most(alternatives: Iterable[dict[str, str]]) -> dict[str, str]:
    """The alternative with the most lines of code."""
    return max(alternatives, key=lambda texts: sum(map(code_lines, texts.values())))


@pytest.mark.parametrize("part", PARTS)
def test_a_role_stays_small(part: str) -> None:
    modules = reach(part)
    server = {name for name in modules if name.split(".")[:2] == ["jaxserve", "server"]}
    path = {
        name: code_lines(text)
        for name, text in modules.items()
        if name.startswith("jaxserve") and name not in server
    }
    print(f"{len(path)} modules, {sum(path.values())} lines of code")
    assert sum(path.values()) <= PARTS[part][0]


def test_an_attention_worker_reaches_model_and_scheduler() -> None:
    modules = reach("attention")
    assert {"jaxserve.engine.scheduler", "jaxserve.model.blocks"} <= set(modules)


def test_the_serving_path_needs_neither_planner_nor_benchmarks() -> None:
    packages = {".".join(name.split(".")[:2]) for name in reach("serve")}
    assert not packages & {"jaxserve.planner", "jaxserve.bench", "jaxserve.plan"}
    assert "pallas_kernels.bench" not in packages


def test_a_process_does_not_reach_what_only_others_run() -> None:
    inside = {"jaxserve.link.runtime_link", "jaxserve.roles.colocated"}
    of_ffn = {"jaxserve.roles.ffn", "jaxserve.model.ffn.exchange"}
    of_attention = {"jaxserve.roles.attention_programs", "jaxserve.model.sampler"}
    engine = {"jaxserve.engine.engine", "jaxserve.engine.scheduler"}
    assert not (inside | of_ffn) & set(reach("attention"))
    assert not (inside | of_attention | engine) & set(reach("ffn"))
    assert not engine & set(reach("follower, attention and ffn"))
    cell = {f"jaxserve.{name}" for name in ("roles.attention", "roles.attention_programs")}
    cell.add("jaxserve.link.runtime_link")
    assert not cell & set(reach("leader, colocated"))
    assert "jaxserve.roles.colocated" not in reach("leader, attention and ffn")
    by_layer = {"jaxserve.roles.schedule", "jaxserve.roles.attention", "jaxserve.link.runtime_link"}
    assert not by_layer & set(closure("jaxserve.roles.step_pipeline"))
    assert by_layer <= set(closure("jaxserve.roles.layer_pipeline"))


def test_a_router_reaches_no_scheduler() -> None:
    engine = {"scheduler", "admission", "dp_group", "lane_slots", "pages"}
    assert not {f"jaxserve.engine.{module}" for module in engine} & set(reach("router"))


def test_who_hands_no_pages_over_does_not_reach_their_link() -> None:
    ends = {"jaxserve.link.pages.client", "jaxserve.link.pages.server"}
    programs = {"jaxserve.roles.page_transfer", "jaxserve.roles.page_spread"}
    engine = {"jaxserve.engine.hand_off", "jaxserve.engine.holds"}
    for part in ("leader, colocated", "leader, attention and ffn", "attention"):
        assert not (ends | programs | engine) & set(reach(part))
    prefill, domain = (set(closure(f"jaxserve.{end}")) for end in OWN_ENDS)
    assert programs <= prefill & domain
    assert ends | engine <= prefill | domain
    assert not ends & prefill & domain


def test_a_worker_that_several_processes_play_reaches_no_link_to_other_weights() -> None:
    assert "jaxserve.checkpoint.peer" not in reach("leader, attention and ffn")
    assert "jaxserve.checkpoint.peer" in reach("alone, attention and ffn")


def test_a_class_name_has_one_meaning() -> None:
    """Names of classes that several modules define; the number only falls."""
    files = [*ROOT.glob("jaxserve/**/*.py"), *ROOT.glob("pallas_kernels/**/*.py")]
    trees = [ast.parse(file.read_text(encoding="utf-8")).body for file in files]
    names = Counter(node.name for body in trees for node in body if isinstance(node, ast.ClassDef))
    assert sum(count > 1 for count in names.values()) <= 58
