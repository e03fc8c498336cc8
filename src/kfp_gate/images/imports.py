"""The imports that a component can reach, found in the syntax tree, function bodies included.

A step fails on an import long after its image was built, often in a branch that only some runs take. This walk
starts at a component's function and follows names: a definition is reached when a reached one mentions its name,
a class with all its methods. Code that is chosen by a text at run time is not followed. Nothing is imported here,
so the answer does not depend on what is installed.
"""

import ast
import functools
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from kfp_gate.images.sources import ImportSite, Reached, SourceTree

_OPTIONAL = {"ImportError", "ModuleNotFoundError", "Exception"}


def reach(tree: SourceTree, modules: Iterable[str] = (), components: Iterable[str] = ()) -> Reached:
    """Follow everything that can be reached.

    Args:
        modules: all their definitions are reached.
        components: modules of components. A step holds the body of the function alone, which kfp's executor runs;
            what stands around it is read where pipelines are compiled, not in the image.

    Raises:
        SyntaxError: a source file does not parse.
        FileNotFoundError: an entry is no module of `tree`.
    """
    walk = _Walk(tree)
    for entry in modules:
        walk.enter(entry)
        if walk.entered[entry] is None:
            raise FileNotFoundError(f"no module {entry}")
        walk.everything(entry)
    for entry in components:
        walk.step(_read(tree, entry))
    return Reached(
        sites=tuple(sorted(walk.sites)),
        own=tuple(sorted(walk.own)),
        modules=tuple(sorted(name for name, module in walk.entered.items() if module)),
        missing=tuple(sorted(walk.missing)),
    )


@dataclass(frozen=True)
class _Binding:
    """What a name stands for after an import: a module, or a name in a module."""

    module: str
    name: str | None = None


@dataclass
class _Module:
    name: str
    file: Path
    tree: ast.Module

    @functools.cached_property
    def definitions(self) -> dict[str, list[ast.stmt]]:
        """Top-level functions and classes by name; a name may be defined in both branches of an `if`."""
        found: dict[str, list[ast.stmt]] = {}
        for node in _top_level(self.tree.body):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                found.setdefault(node.name, []).append(node)
        return found

    @property
    def package(self) -> str:
        return self.name if self.file.name == "__init__.py" else self.name.rpartition(".")[0]


def _top_level(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements run by an import, those within `if`, `try` and `with` included."""
    for node in body:
        yield node
        for inner in ("body", "orelse", "finalbody"):
            if isinstance(node, ast.If | ast.Try | ast.With | ast.For | ast.While):
                yield from _top_level(getattr(node, inner, []))
        for handler in getattr(node, "handlers", []):
            yield from _top_level(handler.body)


@dataclass
class _Walk:
    tree: SourceTree
    sites: set[ImportSite] = field(default_factory=set)
    own: set[ImportSite] = field(default_factory=set)
    missing: set[ImportSite] = field(default_factory=set)
    entered: dict[str, _Module | None] = field(default_factory=dict)
    globals: dict[str, dict[str, _Binding]] = field(default_factory=dict)
    reached: set[tuple[str, str]] = field(default_factory=set)

    def enter(self, name: str) -> None:
        """Import one of our modules: its parents first, then the code outside definitions."""
        if name in self.entered:
            return
        if parent := name.rpartition(".")[0]:
            self.enter(parent)
        if self.tree.file_of(name) is None:
            self.entered[name] = None
            return
        module = self.entered[name] = _read(self.tree, name)
        self.globals[name] = {}
        outside = [n for n in module.tree.body if not isinstance(n, ast.ClassDef)]
        self.globals[name] = self.bind(module, outside, deep=False)
        run: list[ast.AST] = []
        for node in module.tree.body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                # Defaults, annotations and decorators run at import; the body does not.
                run += [node.args, *node.decorator_list, *([node.returns] if node.returns else [])]
            elif isinstance(node, ast.ClassDef):
                run += [*node.bases, *node.keywords, *node.decorator_list]
                run += [n for n in node.body if not isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
            else:
                run.append(node)
        self.follow(module, run, self.globals[name])

    def step(self, module: _Module) -> None:
        """Reach the bodies of a component's functions, and the executor that runs them."""
        for definitions in module.definitions.values():
            for node in definitions:
                if isinstance(node, ast.FunctionDef):
                    self.sites.add(ImportSite(self.place(module), node.lineno, "kfp.dsl.executor_main"))
                    self.follow(module, node.body, self.bind(module, node.body, deep=True))

    def everything(self, name: str) -> None:
        """Reach all definitions of a module: it is an entry, or is handed on as a value."""
        module = self.entered.get(name)
        for definition in module.definitions if module else ():
            self.define(name, definition)

    def define(self, module_name: str, name: str) -> bool:
        """Reach `name` of a module. False: the module has no such definition or imported name."""
        module = self.entered.get(module_name)
        if module is None:
            return False
        if name in module.definitions:
            if (module_name, name) not in self.reached:
                self.reached.add((module_name, name))
                nodes: list[ast.AST] = list(module.definitions[name])
                self.follow(module, nodes, self.globals[module_name] | self.bind(module, nodes, deep=True))
            return True
        if name in self.globals[module_name]:
            self.use(self.globals[module_name][name])
            return True
        return False

    def use(self, binding: _Binding) -> None:
        """An imported name is mentioned without an attribute."""
        if not self.tree.owns(binding.module):
            return
        if binding.name is None:
            self.everything(binding.module)
        else:
            self.define(binding.module, binding.name)

    def bind(self, module: _Module, nodes: Iterable[ast.AST], *, deep: bool) -> dict[str, _Binding]:
        """Record the imports in `nodes`, enter our own modules, and return what each name stands for.

        Args:
            deep: look into the bodies of functions too.
        """
        bindings: dict[str, _Binding] = {}
        for node, optional in _imports(nodes, deep=deep):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    self.take(module, node, alias.name, (), optional)
                    whole = alias.name if alias.asname else alias.name.partition(".")[0]
                    bindings[alias.asname or whole] = _Binding(whole)
                continue
            source = _absolute(module, node)
            names = tuple(alias.name for alias in node.names)
            self.take(module, node, source, names, optional)
            for alias in node.names:
                inner = f"{source}.{alias.name}"
                is_module = self.tree.owns(source) and self.tree.file_of(inner) is not None
                bindings[alias.asname or alias.name] = _Binding(inner) if is_module else _Binding(source, alias.name)
        return bindings

    def take(self, module: _Module, node: ast.stmt, source: str, names: tuple[str, ...], optional: bool) -> None:
        """One import statement."""
        site = ImportSite(self.place(module), node.lineno, source, names, optional)
        if not self.tree.owns(source):
            if site.package not in sys.stdlib_module_names:
                self.sites.add(site)
            return
        self.own.add(site)
        self.enter(source)
        if self.entered[source] is None:
            self.missing.add(site)
        for name in names:
            if self.tree.file_of(f"{source}.{name}") is not None:
                self.enter(f"{source}.{name}")

    def place(self, module: _Module) -> str:
        """The file of a module as an import site names it."""
        package = self.tree.package_of(module.name)
        return "/".join([*package.split("."), *module.file.relative_to(self.tree.packages[package]).parts])

    def follow(self, module: _Module, nodes: Iterable[ast.AST], bindings: Mapping[str, _Binding]) -> None:
        """Reach what `nodes` mention."""
        pending = list(nodes)
        while pending:
            node = pending.pop()
            if isinstance(node, ast.Attribute):
                chain = _chain(node)
                if chain and chain[0] in bindings and self.attribute(bindings[chain[0]], chain[1:]):
                    continue
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
                if node.id in bindings:
                    self.use(bindings[node.id])
                elif module.name in self.entered:
                    self.define(module.name, node.id)
            pending.extend(ast.iter_child_nodes(node))

    def attribute(self, binding: _Binding, chain: list[str]) -> bool:
        """`chain` are the attributes taken from an imported name. True: it was a module, and is dealt with."""
        if binding.name is not None or not self.tree.owns(binding.module):
            return False
        here = binding.module
        for position, name in enumerate(chain):
            if self.define(here, name):
                return True
            inner = f"{here}.{name}"
            if self.tree.file_of(inner) is None:
                return True  # a constant of the module, which its import has dealt with
            here = inner
            if position == len(chain) - 1:
                self.everything(here)
        return True


def _read(tree: SourceTree, name: str) -> _Module:
    file = tree.file_of(name)
    if file is None:
        raise FileNotFoundError(f"no module {name}")
    return _Module(name, file, _parse(file.read_text(encoding="utf-8"), name))


@functools.lru_cache(maxsize=1024)
def _parse(text: str, name: str) -> ast.Module:
    """Kept, because the images share most modules; no one changes a tree."""
    return ast.parse(text, name)


def _absolute(module: _Module, node: ast.ImportFrom) -> str:
    """The module that a `from` import names, relative ones resolved."""
    if not node.level:
        return node.module or ""
    package = module.package.split(".")
    base = package[: len(package) - node.level + 1]
    return ".".join([*base, node.module] if node.module else base)


def _chain(node: ast.Attribute) -> list[str]:
    """`a.b.c` as ["a", "b", "c"]; empty if it does not start with a name."""
    names = [node.attr]
    inner = node.value
    while isinstance(inner, ast.Attribute):
        names.append(inner.attr)
        inner = inner.value
    return [inner.id, *reversed(names)] if isinstance(inner, ast.Name) else []


def _imports(
    nodes: Iterable[ast.AST], *, deep: bool, optional: bool = False
) -> Iterator[tuple[ast.Import | ast.ImportFrom, bool]]:
    """Import statements below `nodes`, and whether the code catches their failure."""
    for node in nodes:
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node, optional
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            yield from _imports(node.orelse, deep=deep, optional=optional)
        elif isinstance(node, ast.Try):
            caught = {
                name.split(".")[-1]
                for handler in node.handlers
                for name in (ast.unparse(handler.type).strip("()").split(", ") if handler.type else ["Exception"])
            }
            yield from _imports(node.body, deep=deep, optional=optional or bool(caught & _OPTIONAL))
            yield from _imports([*node.handlers, *node.orelse, *node.finalbody], deep=deep, optional=optional)
        elif deep or not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield from _imports(ast.iter_child_nodes(node), deep=deep, optional=optional)
