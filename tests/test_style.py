"""The rules of CONTRIBUTING.md that a machine can check: the direction of imports, lengths and nesting, names, openings
of docstrings, where errors may be caught broadly. A rule that makes the code worse is changed here, with its reason.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parent.parent
MAX_MODULE_LINES, MAX_FUNCTION_LINES, MAX_NESTING = 400, 60, 3
MAX_FLAT_MODULES, MAX_PACKAGE_MODULES, MAX_VAGUE_SHARE = 9, 14, 0.02
VAGUE_OPENINGS = {"What", "Of", "Whether", "How", "Where", "Those", "Who", "Which", "As", "By", "For", "In"}
"""Words that no verb and no noun follows soon enough: a docstring begins with a verb or with the thing itself."""
METAPHORS = {
    *("guest", "hall", "farewell", "goodbye", "parcel", "outbox", "greeting", "crew", "stranger", "wish", "deal"),
    *("told", "hear", "heard", "patience", "aftermath"),
}
"""No name has one of these. `kept`, `order` and `turn` are also plain words for policies, sequences and round-robin."""

FLOORS = (
    {"errors"},
    {"region", "dtypes"},
    {"runtime"},
    {"manifest"},
    {"options", "info"},
    {"data"},
    {"planner", "storage", "adapters"},
    {"formats", "memory"},
    {"distributed"},
    {"staging", "name_maps"},
    {"loading", "saving"},
    {"memory_tier"},
    {"checkpoint", "conversion", "diagnostics"},
    {"state_tree"},
    {"phases"},
    {"api"},
    {"manager"},
    {"integrations"},
    {"__init__"},
    {"tools"},
)
"""A part of the package imports the parts on floors before its own, and itself. None may stand on no floor."""
FLOOR_OF = {name: number for number, names in enumerate(FLOORS) for name in names}
NO_TORCH = {"errors", "region", "dtypes", "runtime", "manifest", "options", "info", "planner", "storage", "formats"}

MAY_START_THREADS = {
    "bytecheckpoint/runtime/threads.py",  # the threads that all others share
    "bytecheckpoint/conversion/stream.py",  # reads windows one after another
    # bounds them against connections of unknown processes
    "bytecheckpoint/distributed/liveness/connected_threads.py",
    "bytecheckpoint/integrations/lightning/saves.py",  # acts in the order of the saves
    "bytecheckpoint/manager/after_commit/retried_work.py",  # lives as long as the manager, with a lower priority
    "bytecheckpoint/manager/agreement/stopping.py",  # lives as long as the manager
    "bytecheckpoint/memory/host_mapping.py",  # the error of the CUDA runtime ends with its thread
}
"""Modules that start threads of their own, each for the reason that stands where it does."""

MAY_CATCH_ALL = {
    "bytecheckpoint/manager/after_commit/background.py",  # a user's callback must not stop saves
    "bytecheckpoint/manager/after_commit/retried_work.py",  # a user's policy, and the store: neither may stop saves
    "bytecheckpoint/manager/data/prepared_state.py",  # a user's loader: the save on all ranks raises it
    "bytecheckpoint/distributed/ranks.py",  # a phase that fails on one rank fails on all
    "bytecheckpoint/saving/handle.py",  # what fails in the background is raised by the handle
    "bytecheckpoint/runtime/progress.py",  # a user's callback must not stop a save
    "bytecheckpoint/runtime/threads.py",  # what fails on a thread is reported or kept, and the thread goes on
    # what a tensor subclass raises while it is built is why it is refused
    "bytecheckpoint/adapters/native/subclass_flatten.py",
    # client libraries raise classes of their own, translated in one place
    "bytecheckpoint/storage/backends/fsspec_store.py",
}
MAY_PRINT = {
    # a failure that nobody has seen by the end of the process goes to standard error
    "bytecheckpoint/saving/in_flight.py",
}
MAY_READ_ENVIRONMENT = {
    # the user names the variable of a deadline: a scheduler has no other way to tell a job when it ends
    "bytecheckpoint/manager/save_policies.py",
    # a launcher tells in no other way that it started several processes
    "bytecheckpoint/distributed/ranks.py",
    # it sets a variable, which numpy's BLAS reads when it is imported
    "tools/main.py",
}
POLICIES = {"EverySteps", "EverySeconds", "When"}
"""Names of a save policy and of a keep policy, which users tell apart by their modules."""
VAGUE_NAMES = {"utils", "util", "common", "helpers", "misc", "shared"}

Function = ast.FunctionDef | ast.AsyncFunctionDef
BLOCKS = (ast.If, ast.For, ast.AsyncFor, ast.While, ast.With, ast.AsyncWith, ast.Try, ast.TryStar, ast.Match)


class Module(NamedTuple):
    path: str
    """From the project's root, with forward slashes."""
    source: str

    @property
    def layer(self) -> str:
        """The part of the package that it belongs to: a top-level module's name, or a folder's."""
        parts = self.path.removesuffix(".py").split("/")
        return "tools" if parts[0] == "tools" else parts[1]


@cache
def modules() -> list[Module]:
    paths = sorted([*(ROOT / "bytecheckpoint").rglob("*.py"), *(ROOT / "tools").rglob("*.py")])
    return [Module(path.relative_to(ROOT).as_posix(), path.read_text()) for path in paths]


@cache
def tree_of(module: Module) -> ast.Module:
    return ast.parse(module.source)


def findings(module: Module) -> list[str]:
    tree = tree_of(module)
    found = [*about_the_file(module, tree), *about_imports(module, tree)]
    for node in ast.walk(tree):
        if isinstance(node, Function):
            found += about_a_function(node)
        else:
            found += about_a_node(module, node)
    return [f"{module.path}:{text}" for text in found]


def about_the_file(module: Module, tree: ast.Module) -> Iterator[str]:
    num_lines = len(module.source.splitlines())
    name = Path(module.path).stem
    if num_lines > MAX_MODULE_LINES:
        yield f"1: {num_lines} lines, more than {MAX_MODULE_LINES}: split it along a second responsibility"
    if name in VAGUE_NAMES or name.startswith("base_"):
        yield "1: a file is named after its job"
    if not ast.get_docstring(tree):
        yield "1: a module starts with why it exists"
    if "\u2014" in module.source:
        yield "1: no em-dashes: write two sentences, or a colon"
    if re.search(r"and \{[^}]*\} more", module.source) and module.path != "bytecheckpoint/errors.py":
        yield "1: errors.and_more and errors.rest_text say how many are left out"


def about_imports(module: Module, tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        for name in imported_names(node, package_of(module)):
            head, _, rest = name.partition(".")
            if head == "torch" and module.layer in NO_TORCH:
                yield f"{node.lineno}: {module.layer} knows no torch"
            if head == "tools":
                yield f"{node.lineno}: tools is imported as bytecheckpoint.tools"
            if head == "bytecheckpoint" and not may_import(module.layer, rest.split(".")[0]):
                yield f"{node.lineno}: {module.layer} stands below {name}, or beside it"


def package_of(module: Module) -> str:
    folder = module.path.rpartition("/")[0].replace("/", ".")
    return f"bytecheckpoint.{folder}" if module.layer == "tools" else folder


def imported_names(node: ast.AST, package: str) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if not isinstance(node, ast.ImportFrom):
        return []
    parent = package.rsplit(".", node.level - 1)[0] + "." if node.level else ""
    source = parent + (node.module or "")
    # `from bytecheckpoint import api` names a module as well as `import bytecheckpoint.api` does.
    return [f"{source.rstrip('.')}.{alias.name}" for alias in node.names]


def may_import(layer: str, target: str) -> bool:
    # A name that is no part of the package is one of those that the package itself offers, as `bcp.save` is.
    return layer == target or FLOOR_OF.get(target, FLOOR_OF["__init__"]) < FLOOR_OF[layer]


def about_a_function(function: Function) -> Iterator[str]:
    where = f"{function.lineno}: {function.name}"
    first = function.body[1] if ast.get_docstring(function) and len(function.body) > 1 else function.body[0]
    num_lines = (function.end_lineno or 0) - first.lineno + 1
    if num_lines > MAX_FUNCTION_LINES:
        yield f"{where} has {num_lines} lines, more than {MAX_FUNCTION_LINES}"
    if (depth := nesting(function)) > MAX_NESTING:
        yield f"{where} nests {depth} deep, more than {MAX_NESTING}"


def nesting(node: ast.AST, depth: int = 0) -> int:
    deepest = depth
    for field, value in ast.iter_fields(node):
        for child in value if isinstance(value, list) else [value]:
            if not isinstance(child, ast.AST) or isinstance(child, Function):
                continue
            is_elif = isinstance(node, ast.If) and field == "orelse" and isinstance(child, ast.If)
            deepest = max(deepest, nesting(child, depth + (isinstance(child, BLOCKS) and not is_elif)))
    return deepest


def about_a_node(module: Module, node: ast.AST) -> Iterator[str]:
    match node:
        case ast.ExceptHandler():
            yield from about_a_handler(module, node)
        case ast.Assert():
            yield f"{node.lineno}: assert is for tests: raise a typed error"
        case ast.Global():
            yield f"{node.lineno}: no module keeps state that changes"
        case ast.Attribute(value=ast.Name("os"), attr="environ" | "getenv" | "environb") if (
            module.path not in MAY_READ_ENVIRONMENT
        ):
            yield f"{node.lineno}: the library reads no environment variables: options are arguments"
        case ast.Call(
            func=ast.Name("Thread" | "ThreadPoolExecutor" | "Timer")
            | ast.Attribute(attr="Thread" | "ThreadPoolExecutor" | "Timer")
        ) if module.path not in MAY_START_THREADS:
            yield f"{node.lineno}: run_jobs, shared_threads and background_threads start threads"
        case ast.Call(func=ast.Name("print")) if module.layer != "tools" and module.path not in MAY_PRINT:
            yield f"{node.lineno}: log instead of printing"


def about_a_handler(module: Module, handler: ast.ExceptHandler) -> Iterator[str]:
    if handler.type is None:
        yield f"{handler.lineno}: name what is caught"
        return
    types = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    is_broad = any(isinstance(each, ast.Name) and each.id in {"Exception", "BaseException"} for each in types)
    last = handler.body[-1]
    raises_again = isinstance(last, ast.Raise) and last.exc is None
    if is_broad and not raises_again and module.path not in MAY_CATCH_ALL:
        yield f"{handler.lineno}: only a phase, the background and one boundary catch everything"
    if all(isinstance(statement, ast.Pass) for statement in handler.body):
        yield f"{handler.lineno}: an error is swallowed: use contextlib.suppress with a reason, or handle it"


@pytest.mark.parametrize("module", modules(), ids=lambda module: module.path)
def test_a_module_keeps_to_the_style(module: Module) -> None:
    assert findings(module) == []


def test_packages_are_small() -> None:
    folders = {path.parent for tree in ("bytecheckpoint", "tools") for path in (ROOT / tree).rglob("*.py")}
    counts = {folder.relative_to(ROOT).as_posix(): len(modules_in(folder)) for folder in folders}
    assert counts.pop("bytecheckpoint") <= MAX_FLAT_MODULES
    assert {name: count for name, count in counts.items() if count > MAX_PACKAGE_MODULES} == {}


def modules_in(folder: Path) -> list[Path]:
    return [path for path in folder.glob("*.py") if not path.name.startswith("__")]


def test_no_modules_import_one_another_in_a_circle() -> None:
    every = {dotted(module.path) for module in modules()} - {"bytecheckpoint"}  # it names the others for type checkers
    imports = {dotted(module.path): imported_modules(module) & every for module in modules()}
    del imports["bytecheckpoint"]
    while free := [name for name, names in imports.items() if not names & imports.keys() - {name}]:
        for name in free:
            del imports[name]
    assert sorted(imports) == []


def dotted(path: str) -> str:
    name = path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    return f"bytecheckpoint.{name}" if name.startswith("tools") else name


def imported_modules(module: Module) -> set[str]:
    """Returns the dotted names that a module imports, and the modules that they would be names in."""
    names = {name for node in ast.walk(tree_of(module)) for name in imported_names(node, package_of(module))}
    return names | {name.rpartition(".")[0] for name in names}


def test_a_class_name_stands_for_one_class() -> None:
    owners: dict[str, list[str]] = {}
    for module in modules():
        for node in ast.walk(tree_of(module)):
            if isinstance(node, ast.ClassDef):
                owners.setdefault(node.name.lstrip("_"), []).append(module.path)
    assert {name: paths for name, paths in owners.items() if len(paths) > 1 and name not in POLICIES} == {}


def test_docstrings_begin_with_a_verb_or_the_thing() -> None:
    texts = [
        (f"{module.path}:{node.lineno}", text.split()[0])
        for module in modules()
        for node in ast.walk(tree_of(module))
        if isinstance(node, ast.ClassDef | Function) and (text := ast.get_docstring(node))
    ]
    vague = [where for where, word in texts if word in VAGUE_OPENINGS]
    assert len(vague) <= MAX_VAGUE_SHARE * len(texts), vague


def test_an_import_makes_no_object_that_changes() -> None:
    """State of the process is made by the first call that needs it: an empty dict at most waits for it."""
    trees = [(module, tree_of(module)) for module in modules()]
    changing = {
        node.name
        for _, tree in trees
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef) and not is_immutable(node)
    } | {"Lock", "RLock", "Event", "Condition", "Queue", "SimpleQueue", "deque", "local", "ThreadPoolExecutor"}
    made = [
        f"{module.path}:{node.lineno}"
        for module, tree in trees
        for node in tree.body
        if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.Call)
        if ast.unparse(node.value.func).rpartition(".")[2].partition("[")[0] in changing
    ]
    assert made == []


def is_immutable(node: ast.ClassDef) -> bool:
    bases = {ast.unparse(base).rpartition(".")[2] for base in node.bases}
    is_frozen = any("frozen=True" in ast.unparse(told) for told in (*node.decorator_list, *node.keywords))
    return is_frozen or not bases.isdisjoint({"NamedTuple", "Enum", "Protocol"})


def test_no_name_is_a_metaphor() -> None:
    found = {
        f"{module.path}:{node.lineno}: {name}"
        for module in modules()
        for node in ast.walk(tree_of(module))
        for name in defined_names(node)
        if METAPHORS & {word.removesuffix("s") for word in words_of(name)}
    }
    assert sorted(found) == []


def defined_names(node: ast.AST) -> list[str]:
    match node:
        case ast.ClassDef() | ast.FunctionDef() | ast.AsyncFunctionDef():
            return [node.name]
        case ast.arg():
            return [node.arg]
        case ast.Name(ctx=ast.Store()):
            return [node.id]
        case ast.Attribute(ctx=ast.Store()):
            return [node.attr]
    return []


def words_of(name: str) -> list[str]:
    return re.findall(r"[a-z]+", re.sub(r"([A-Z])", r"_\1", name).lower())


def test_tests_lie_as_the_packages_do() -> None:
    packages = {path.name for path in (ROOT / "bytecheckpoint").iterdir() if (path / "__init__.py").exists()}
    assert packages | {"tools"} <= {path.name for path in (ROOT / "tests").iterdir() if path.is_dir()}


def test_the_picture_of_the_packages_shows_every_part_on_its_floor() -> None:
    picture = (ROOT / "docs" / "pictures" / "packages.svg").read_text()
    shown: dict[int, set[str]] = {}
    for top, name in re.findall(r'<rect x="\d+" y="(\d+)"[^>]* rx="6"[^>]*/>\n<text [^>]*>(\w+)</text>', picture):
        shown.setdefault(int(top), set()).add(name)
    floors = [shown[top] for top in sorted(shown, reverse=True)]
    assert floors == [floor for floor in FLOORS if floor != {"__init__"}]


def test_contributing_lists_the_floors() -> None:
    listed = re.search(r"^    errors < .*?\n\n", (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE | re.DOTALL)
    floors = [set(re.findall(r"\w+", floor)) for floor in listed.group().split("<")] if listed else []
    assert floors == [floor for floor in FLOORS if floor != {"__init__"}]


def in_function(body: str) -> str:
    return '"""Why."""\ndef f():\n' + "".join(f"    {line}\n" for line in body.splitlines())


@pytest.mark.parametrize(
    ("path", "source", "expected"),
    [
        ("bytecheckpoint/planner/plan.py", '"""Why."""\nimport torch', "planner knows no torch"),
        ("bytecheckpoint/storage/a.py", '"""Why."""\nfrom torch import Tensor', "storage knows no torch"),
        ("bytecheckpoint/storage/a.py", '"""Why."""\nfrom bytecheckpoint.planner.plan import b', "or beside it"),
        ("bytecheckpoint/adapters/a.py", '"""Why."""\nimport bytecheckpoint.storage.store', "or beside it"),
        ("bytecheckpoint/adapters/a.py", '"""Why."""\nfrom bytecheckpoint import staging', "adapters stands below"),
        ("bytecheckpoint/adapters/a.py", '"""Why."""\nfrom ..planner import plan', "or beside it"),
        ("bytecheckpoint/region.py", '"""Why."""\nfrom bytecheckpoint.options import SaveOptions', "region stands"),
        ("bytecheckpoint/region.py", '"""Why."""\nfrom . import manifest', "region stands below"),
        (
            "bytecheckpoint/manifest/encoding.py",
            '"""Why."""\nfrom bytecheckpoint.storage.store import Store',
            "manifest stands",
        ),
        (
            "bytecheckpoint/staging/file_image.py",
            '"""Why."""\nfrom bytecheckpoint.api import save',
            "staging stands below",
        ),
        ("bytecheckpoint/api.py", '"""Why."""\nfrom bytecheckpoint.tools.main import main', "api stands below"),
        ("tools/main.py", '"""Why."""\nfrom tools import show', "imported as bytecheckpoint.tools"),
        ("bytecheckpoint/api.py", in_function("x = 1\n" * 61), "f has 61 lines"),
        ("bytecheckpoint/api.py", '"""Why."""\n' * 401, "401 lines"),
        ("bytecheckpoint/api.py", in_function("if a:\n for b in c:\n  with d:\n   while e:\n    pass"), "nests 4 deep"),
        ("bytecheckpoint/api.py", "x = 1", "why it exists"),
        ("bytecheckpoint/utils.py", '"""Why."""', "named after its job"),
        ("bytecheckpoint/api.py", '"""Why \u2014 because."""', "em-dashes"),
        ("tools/show.py", '"""Why."""\nf"and {len(names) - 3:,} more"', "errors.and_more"),
        ("bytecheckpoint/api.py", in_function("try:\n pass\nexcept:\n raise"), "name what is caught"),
        ("bytecheckpoint/api.py", in_function("try:\n pass\nexcept Exception:\n return"), "catch everything"),
        ("bytecheckpoint/api.py", in_function("try:\n pass\nexcept (OSError, BaseException):\n return"), "catch every"),
        ("bytecheckpoint/api.py", in_function("try:\n pass\nexcept OSError:\n pass"), "swallowed"),
        ("bytecheckpoint/api.py", in_function("assert a"), "assert is for tests"),
        ("bytecheckpoint/api.py", in_function("global a"), "keeps state"),
        ("bytecheckpoint/api.py", in_function("os.environ['A']"), "environment"),
        ("bytecheckpoint/api.py", in_function("print(a)"), "log instead"),
        ("bytecheckpoint/api.py", in_function("threading.Thread(target=a).start()"), "start threads"),
        ("tools/main.py", in_function("with ThreadPoolExecutor(2) as pool:\n pass"), "start threads"),
    ],
)
def test_each_rule_is_seen_to_bite(path: str, source: str, expected: str) -> None:
    found = findings(Module(path, source))
    assert any(expected in finding for finding in found), found


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("bytecheckpoint/staging/file_image.py", '"""Why."""\nimport torch\nfrom bytecheckpoint.planner.plan import a'),
        (
            "bytecheckpoint/api.py",
            '"""Why."""\nfrom bytecheckpoint.staging.snapshots import a\nfrom bytecheckpoint import errors',
        ),
        ("bytecheckpoint/planner/a.py", '"""Why."""\nfrom . import b\nfrom bytecheckpoint.planner.c import d'),
        ("bytecheckpoint/storage/a.py", in_function("try:\n pass\nexcept BaseException:\n clean()\n raise")),
        ("bytecheckpoint/distributed/ranks.py", in_function("try:\n pass\nexcept Exception as error:\n tell(error)")),
        ("bytecheckpoint/api.py", in_function("if a:\n b\nelif c:\n d\nelif e:\n f\nelif g:\n h\nelif i:\n j")),
        ("tools/main.py", in_function("print(a)")),
    ],
)
def test_what_is_allowed_passes(path: str, source: str) -> None:
    assert findings(Module(path, source)) == []
