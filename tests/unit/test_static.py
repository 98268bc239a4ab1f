"""What can be seen without running anything: one door to time and chance, constant SQL (R76), names that are there,
one judge of keys (R14, R15), nothing written twice (R77), nothing skipped (R75)."""

from __future__ import annotations

import ast
import importlib
import pkgutil
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from tests.contrib.django_shop import set_up as set_up_django

import oncehook

PACKAGE = Path(oncehook.__file__).parent
MODULES = sorted(PACKAGE.rglob("*.py"))
assert len(MODULES) > 40

EXECUTING = {"execute", "executemany", "executescript"}


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


def imported(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield node.module or ""


# -- time and chance ---------------------------------------------------------------------------


OTHERS = [path for path in MODULES if path != PACKAGE / "clock.py"]


def test_only_the_clock_knows_time_and_chance() -> None:
    assert not [path for path in OTHERS if {"time", "random", "secrets"} & set(imported(parsed(path)))]


def now_calls(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in ("now", "utcnow", "today", "urandom", "uuid4", "uuid1"):
            owner = ast.unparse(node.value)
            if owner.split(".")[-1] in ("datetime", "date", "os", "uuid"):
                yield f"{owner}.{node.attr}"


def test_nobody_goes_round_the_clock() -> None:
    assert not [(path, call) for path in OTHERS for call in now_calls(parsed(path))]


# -- SQL ---------------------------------------------------------------------------------------


def is_constant(node: ast.expr, constants: set[str]) -> bool:
    """Text that no value can get into: literals, sums of such, and names, attributes or entries of such."""
    if isinstance(node, ast.Constant):
        return isinstance(node.value, str)
    if isinstance(node, ast.BinOp):
        return isinstance(node.op, ast.Add) and all(is_constant(side, constants) for side in (node.left, node.right))
    if isinstance(node, ast.Name):
        return node.id in constants
    if isinstance(node, ast.Attribute):  # statements.FIND
        return isinstance(node.value, ast.Name) and node.attr.isupper()
    if isinstance(node, ast.Subscript):
        return is_constant(node.value, constants)
    return False


def assigned(tree: ast.Module) -> Iterator[tuple[str, ast.expr]]:
    """Names given at the top of a module, with their values."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            yield node.targets[0].id, node.value
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value is not None:
            yield node.target.id, node.value


def constants_of(tree: ast.Module) -> set[str]:
    """Names at the top of a module that hold constant text, tables of it, or come from another module in capitals."""
    found = {
        alias.asname or alias.name
        for node in tree.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if (alias.asname or alias.name).isupper()
    }
    for name, value in assigned(tree):
        entries = list(value.values) if isinstance(value, ast.Dict) else [value]
        if all(is_constant(entry, found) for entry in entries):
            found.add(name)
    return found


class Statements(ast.NodeVisitor):
    """Every place in a module that hands text to the database, when that text is not constant."""

    def __init__(self, tree: ast.Module) -> None:
        self.constants = constants_of(tree)
        self.scopes: list[set[str]] = []
        self.wrong: list[str] = []
        self.seen = 0
        self.visit(tree)

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        self.scopes.append(self.local_constants(node))
        self.generic_visit(node)
        self.scopes.pop()

    visit_AsyncFunctionDef = visit_FunctionDef

    def local_constants(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> set[str]:
        """Names that a function gives constant text, or takes from a loop over such; and `statement` parameters.

        A parameter called `statement` only hands on: whoever calls that function is looked at instead.
        """
        arguments = [*node.args.args, *node.args.kwonlyargs]
        found = {argument.arg for argument in arguments if argument.arg == "statement"}
        known = self.constants | found
        for inner in ast.walk(node):
            if isinstance(inner, ast.Assign) and isinstance(inner.targets[0], ast.Name):
                if is_constant(inner.value, known):
                    found.add(inner.targets[0].id)
            elif isinstance(inner, ast.For) and isinstance(inner.target, ast.Name):
                values = inner.iter.elts if isinstance(inner.iter, ast.Tuple | ast.List) else []
                if values and all(is_constant(value, known) for value in values):
                    found.add(inner.target.id)
        return found

    def visit_Call(self, node: ast.Call) -> None:
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        places = {0} if name in EXECUTING else HANDING.get(name, set())
        texts = [node.args[place] for place in places if place < len(node.args)]
        if texts:
            self.seen += 1
            known = self.constants.union(*self.scopes)
            if not any(is_constant(text, known) for text in texts):
                self.wrong.append(f"line {node.lineno}: {ast.unparse(texts[-1])[:80]}")
        self.generic_visit(node)


STORE = sorted((PACKAGE / "store").rglob("*.py"))
HANDS_ON = r"(?:execute\w*|rows|fetch\w*|ask)\((?:\w+, )?statement\b"


def handing_functions() -> dict[str, set[int]]:
    """Functions of the store that hand a `statement` on to the database, and at which places (self left out)."""
    found: dict[str, set[int]] = {}
    for path in STORE:
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                names = [argument.arg for argument in node.args.args if argument.arg != "self"]
                if "statement" in names and re.search(HANDS_ON, ast.unparse(node)):
                    found.setdefault(node.name, set()).add(names.index("statement"))
    return found


HANDING = handing_functions()

ALLOWED = {
    # the numbered files of the schema: text of ours that is read at start
    # and what a connection of ours hands on, whoever calls it
    "sqlite/connection.py": {"statement"},
    "postgres/connection.py": {"statement.encode()", "query"},
}


@pytest.mark.parametrize("path", STORE, ids=lambda path: str(path.relative_to(PACKAGE / "store")))
def test_sql_is_constant_text(path: Path) -> None:
    allowed = ALLOWED.get(str(path.relative_to(PACKAGE / "store")), set())
    wrong = [line for line in Statements(parsed(path)).wrong if line.partition(": ")[2] not in allowed]
    assert not wrong, f"{path.name}: {wrong}"


def test_statements_for_many_rows_are_made_of_constants() -> None:
    seen = 0
    for path in (PACKAGE / "store/sqlite").glob("*.py"):
        tree = parsed(path)
        calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
        made = [call for call in calls if ast.unparse(call.func) in ("Insert", "InsertRows", "Update")]
        at_the_top = [value for _, value in assigned(tree) if value in made]
        assert len(made) == len(at_the_top), path.name
        constants = constants_of(tree)
        for call in made:
            assert all(is_constant(text, constants) or _is_number(text) for text in call.args), ast.unparse(call)
        seen += len(made)
    assert seen > 15


def test_statements_with_names_are_made_when_a_module_is_imported() -> None:
    """No value can get into a text that is put together before there are any."""
    makers = {"Statement", "Dialect", "_way_to_deliveries", "_way_to_events", "_list_deliveries", "_list_events"}
    seen = 0
    for path in STORE:
        for node in ast.walk(parsed(path)):
            calls = [one for one in ast.walk(node) if isinstance(one, ast.Call) and ast.unparse(one.func) in makers]
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                assert not calls or node.name in makers, f"{path.name}: {node.name} makes a statement at run time"
            elif isinstance(node, ast.Module):
                seen += len(calls)
    assert seen > 20


def _is_number(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, int)


def test_the_check_sees_statements_at_all() -> None:
    assert sum(Statements(parsed(path)).seen for path in STORE) > 30


@pytest.mark.parametrize(
    "code",
    [
        'c.execute(f"SELECT {x}")',
        'c.execute("SELECT %s" % x)',
        'c.execute("SELECT " + x)',
        'c.execute("SELECT {}".format(x))',
        'c.execute(" ".join(x))',
        'Q = "SELECT {}"\nc.execute(Q.format(x))',
        "c.executemany(build(x), [])",
        "def f(text):\n    c.execute(text)",
        'def f(x):\n    q = f"SELECT {x}"\n    c.execute(q)',
        "Q = make()\nc.execute(Q)",
        'Q = {1: f"{x}"}\nc.execute(Q[1])',
    ],
)
def test_the_check_sees_formatted_sql(code: str) -> None:
    assert Statements(ast.parse(code)).wrong


@pytest.mark.parametrize(
    "code",
    [
        'c.execute("SELECT 1")',
        'Q = "SELECT 1"\nc.execute(Q + " LIMIT ?", (x,))',
        'Q: str = "SELECT 1"\nT = {1: Q + "x"}\nc.execute(T[x])',
        'def f():\n    for q in ("PRAGMA a", "PRAGMA b"):\n        c.execute(q)',
        "from m import QUERY\nc.execute(QUERY)",
    ],
)
def test_the_check_lets_constant_sql_pass(code: str) -> None:
    assert not Statements(ast.parse(code)).wrong


def test_sql_stays_in_the_store() -> None:
    elsewhere = [path for path in MODULES if PACKAGE / "store" not in path.parents and "contrib" not in path.parts]
    talking = {
        str(path.relative_to(PACKAGE))
        for path in elsewhere
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.Attribute) and node.attr in EXECUTING
    }
    assert talking <= {"claims/postgres.py", "claims/sqlite.py"}  # tests/claims/test_wording.py looks at those


# -- one judge of keys -------------------------------------------------------------------------


def test_redis_is_no_part_of_the_inbox() -> None:
    """R14, R15: the store's unique index decides; nothing that may forget comes before it."""
    users = {
        path.relative_to(PACKAGE).parts[0]
        for path in MODULES
        if "redis" in {n.split(".")[0] for n in imported(parsed(path))}
    }
    assert users == {"claims"}
    for part in ("receive.py", "inbox.py", "worker.py", "web", "store"):
        for path in MODULES:
            if path.relative_to(PACKAGE).parts[0] == part:
                assert not any(name.startswith("oncehook.claims") for name in imported(parsed(path))), path


# -- one way to do it --------------------------------------------------------------------------

LINES = 6
"""Lines from which two functions with the same body are one that stands there twice."""


def bodies(text: str, tree: ast.AST) -> Iterator[tuple[str, str]]:
    """Yield name and body of every function of some length."""
    lines = [line.strip() for line in text.splitlines()]
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            done = node.body[1:] if ast.get_docstring(node, clean=False) is not None else node.body
            if done and (node.end_lineno or 0) - done[0].lineno + 1 >= LINES:
                yield node.name, "\n".join(lines[done[0].lineno - 1 : node.end_lineno])


def repeated(modules: dict[str, tuple[str, ast.AST]]) -> list[list[str]]:
    """Return the functions that do the same, word for word."""
    places: dict[str, list[str]] = {}
    for where, (text, tree) in modules.items():
        for name, body in bodies(text, tree):
            places.setdefault(body, []).append(f"{where}:{name}")
    return [found for found in places.values() if len(found) > 1]


def test_no_function_stands_there_twice() -> None:
    """R77"""
    assert not repeated({str(path.relative_to(PACKAGE)): (path.read_text(), parsed(path)) for path in MODULES})


def test_the_check_sees_a_function_that_was_copied() -> None:
    text = (PACKAGE / "retry.py").read_text()
    assert repeated({"a": (text, ast.parse(text)), "b": (text, ast.parse(text))})


# -- the tests themselves ----------------------------------------------------------------------


def skips(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in ("skip", "skipif", "importorskip", "skipTest"):
            yield ast.unparse(node)


def test_no_test_is_skipped() -> None:
    """R75: a service that is missing is a failure."""
    files = sorted(Path(__file__).parents[1].rglob("*.py"))
    assert len(files) > 100
    for path in files:
        if "skip" in path.read_text():
            assert not list(skips(parsed(path))), path
    assert list(skips(ast.parse("import pytest\n@pytest.mark.skipif(True)\ndef test_a(): ...")))


# -- names -------------------------------------------------------------------------------------


def module_names() -> list[str]:
    return [module.name for module in pkgutil.walk_packages([str(PACKAGE)], "oncehook.")]


def test_public_names_are_there() -> None:
    set_up_django()  # whose modules cannot be imported before it knows its settings
    for name in ["oncehook", *module_names()]:
        if name.endswith("__main__"):
            continue
        module = importlib.import_module(name)
        assert module.__doc__ or not Path(str(module.__file__)).read_text().strip(), f"{name}: it says what it is for"
        for public in getattr(module, "__all__", ()):
            assert getattr(module, public) is not None, name
