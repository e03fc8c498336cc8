"""Which imports a component can reach."""

import textwrap
from pathlib import Path

import pytest

from kfp_gate.images.imports import reach
from kfp_gate.images.sources import SourceTree


@pytest.fixture
def tree(tmp_path: Path):
    def make(**files: str) -> SourceTree:
        root = tmp_path / "own"
        for name, text in files.items():
            path = root.joinpath(*name.split("__")).with_suffix(".py")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(textwrap.dedent(text))
        for folder in {root, *(path.parent for path in root.rglob("*.py"))}:
            (folder / "__init__.py").touch()
        return SourceTree({"own": root})

    return make


def packages(tree: SourceTree, entry: str = "own.start") -> set[str]:
    return {site.module for site in reach(tree, [entry]).sites}


def test_bodies_of_functions_and_methods_are_searched(tree):
    found = packages(
        tree(
            start="""
            import alpha

            def run():
                import beta.inner
                def within():
                    from gamma import thing
                return Class().method

            class Class:
                import delta
                def method(self):
                    import epsilon
            """
        )
    )
    assert found == {"alpha", "beta.inner", "gamma", "delta", "epsilon"}


def test_only_what_is_mentioned_is_reached_in_other_modules(tree):
    own = tree(
        start="""
        from own.other import used
        import own.third as third

        def run():
            used()
            third.used_too()
        """,
        other="""
        import always

        def used():
            return helper()

        def helper():
            import alpha

        def unused():
            import never
        """,
        third="""
        def used_too():
            return Class

        class Class:
            def method(self):
                import beta

        class Unused:
            def method(self):
                import never
        """,
    )
    assert packages(own) == {"always", "alpha", "beta"}


def test_defaults_decorators_and_code_at_module_level_count(tree):
    own = tree(
        start="import own.other",
        other="""
        def deco(function):
            import alpha
            return function

        def default():
            import beta

        @deco
        def unused(value=default()):
            import never

        TABLE = {"x": entry} if (entry := unused_before) else {}
        """,
    )
    assert packages(own) == {"alpha", "beta"}


def test_names_pass_through_reexports_and_relative_imports(tree):
    own = tree(
        start="""
        from own import front

        def run():
            front.work()
        """,
        front="from .room.deep import work",
        room__deep="""
        from .. import side

        def work():
            from . import neighbour
            neighbour.go()
            return side
        """,
        room__neighbour="def go():\n    import alpha\n",
        side="def anything():\n    import beta\n",
    )
    # `side` is handed on as a value: whatever it holds may be called.
    assert packages(own) == {"alpha", "beta"}


def test_types_for_the_checker_are_left_out_and_caught_failures_are_optional(tree):
    own = tree(
        start="""
        from typing import TYPE_CHECKING

        if TYPE_CHECKING:
            import never

        try:
            import faster
        except ImportError:
            import slower

        try:
            import must
        except ValueError:
            pass
        """
    )
    sites = {site.module: site.optional for site in reach(own, ["own.start"]).sites}
    assert sites == {"faster": True, "slower": False, "must": False}


def test_the_standard_library_is_left_out_and_lines_are_named(tree):
    own = tree(start="import os, json\n\n\ndef run():\n    from xml import sax\n    from zeta.part import a, b\n")
    (site,) = reach(own, ["own.start"]).sites
    assert str(site) == "own/start.py:6: from zeta.part import a, b"


def test_of_a_component_only_the_body_counts(tree):
    own = tree(
        start="""
        import authoring_only

        @authoring_only.component(image=reference())
        def start(value: str = ""):
            from own.other import work
            work(value)

        def reference():
            import alpha
        """,
        other="def work(value):\n    import beta\n",
    )
    # Both functions: a helper may be embedded too. The image gets kfp's executor and never the module's head.
    found = {site.module for site in reach(own, components=["own.start"]).sites}
    assert found == {"kfp.dsl.executor_main", "alpha", "beta"}


def test_a_module_of_ours_that_does_not_exist(tree):
    own = tree(start="def run():\n    from own.gone import thing\n")
    (site,) = reach(own, ["own.start"]).missing
    assert str(site) == "own/start.py:2: from own.gone import thing"
    with pytest.raises(FileNotFoundError):
        reach(own, ["own.nothing"])


def test_modules_that_import_each_other_end(tree):
    own = tree(
        start="from own.other import b\n\ndef a():\n    return b()\n",
        other="def b():\n    from own.start import a\n    import alpha\n    return a\n",
    )
    assert packages(own) == {"alpha"}
