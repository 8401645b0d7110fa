"""The queues that are measured, read from the files in `peers/`. Each has a separate environment.

A peer's file imports the peer, which is installed only in its environment. What has to be known
before (packages, stores, whether it enqueues in bulk) is therefore read from the file's text.
"""

from __future__ import annotations

import ast
import json
import subprocess
from dataclasses import dataclass
from pathlib import Path

from benchmarks.environments import environment

PEERS = Path(__file__).parent / "peers"
OMNIQ = "omniq"
REQUIRED_FUNCTIONS = {"open", "close", "one", "work"}
OPTIONAL_FUNCTIONS = {"many", "later"}

DRIVERS = ("asyncpg", "psycopg", "redis", "hiredis", "uvloop")

_VERSIONS = """
import importlib.metadata, json, sys
installed = {each.name.lower().replace("_", "-"): each.version for each in importlib.metadata.distributions()}
print(json.dumps({name: installed[name] for name in sys.argv[1:] if name in installed}))
"""


@dataclass(frozen=True)
class Peer:
    """One peer, as its file describes it."""

    name: str
    packages: tuple[str, ...]
    stores: tuple[str, ...]
    keeps: str
    tuned: str
    functions: frozenset[str]
    is_async: bool

    @property
    def has_bulk(self) -> bool:
        return "many" in self.functions

    def python(self) -> Path:
        """Return the interpreter of its environment, created on first use with the newest versions."""
        return environment(self.name, list(self.packages))

    def versions(self) -> dict[str, str]:
        """Return the versions of the peer, of its named packages, and of the drivers it uses."""
        named = [package.partition("[")[0] for package in self.packages]
        names = dict.fromkeys([self.name.replace("_", "-"), *named, *DRIVERS])
        command = [str(self.python()), "-c", _VERSIONS, *names]
        found = subprocess.run(command, check=True, capture_output=True, text=True)
        return dict(json.loads(found.stdout))


def read(path: Path) -> Peer:
    """Read a peer from its file, without running the file."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    values: dict[str, object] = {}
    functions: dict[str, bool] = {}
    for node in tree.body:
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=value) if name.isupper():
                values[name] = ast.literal_eval(value)
            case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value):
                values[name] = ast.literal_eval(value) if name.isupper() else None
            case ast.FunctionDef(name=name):
                functions[name] = False
            case ast.AsyncFunctionDef(name=name):
                functions[name] = True
            case _:
                pass
    packages, stores = values["PACKAGES"], values["STORES"]
    assert isinstance(packages, list)
    assert isinstance(stores, list)
    return Peer(
        name=path.stem,
        packages=tuple(packages),
        stores=tuple(stores),
        keeps=str(values["KEEPS"]),
        tuned=" ".join((ast.get_docstring(tree) or "").split()),
        functions=frozenset(functions),
        is_async=functions["one"],
    )


def all_peers() -> dict[str, Peer]:
    """Return every peer by its name, omniq first."""
    paths = sorted(path for path in PEERS.glob("*.py") if path.stem != "__init__")
    peers = {path.stem: read(path) for path in paths}
    return {OMNIQ: peers.pop(OMNIQ), **peers}
