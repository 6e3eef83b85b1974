"""The reference pages of the site: one for each public package, of the names in its ``__all__``.

mkdocstrings reads the sources without importing them; `Reference` hands it the docstrings as Markdown.
"""

from __future__ import annotations

import ast
import re
import runpy
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

from griffe import Alias, Extension, NameResolutionError, Parameter, ParameterKind, Parameters

PACKAGE = Path(__file__).parents[2] / "src/lipkit"
INDEX = "reference/index.md"
# Lines of a table of the package that is shown in full; longer ones are described by their docstring alone.
LONGEST_TABLE = 20

# A section, or an indented block: code after two colons, else what is shown as it stands.
_BLOCK = re.compile(
    r"^(?P<title>[A-Z]\w+):\n(?P<body>(?:\n* {4}.*)+)|(?P<colons>::?)?\n\n(?P<verbatim> {4}.*(?:\n+ {4}.*)*)", re.M
)
_ITEM = re.compile(r"^ {4}(?P<names>\*{0,2}\w+(?:, \*{0,2}\w+)*): ", re.M)
_NEXT_ERROR = re.compile(r"\.\s+(?=\w+Error: )")
_TITLES = {"Args": "Arguments"}
# What is no running text, or a sign that Markdown would read.
_MARKUP = re.compile(
    r"(?P<doctest>^ *>>> (?:[^\n]+\n?)+)"
    r"|^(?P<indent> *)\.\. math::(?P<display>[^\n]*(?:\n+(?P=indent) +[^\n]*)*)"
    r"|:math:`(?P<inline>[^`]+)`"
    r"|(?::\w+:`~?|``?(?=lipkit\.))(?P<target>[\w.]+)``?"
    r"|(?P<literal>^```.+?^```$|``.+?``|`[^`]+`|\*\*\w[^*]*\*\*)"
    r"|(?P<sign>[*_<\[\]])",
    re.M | re.S,
)


def placeholder(latex: str, display: str) -> str:
    """A word that Markdown leaves alone in place of a formula; `hooks.py` draws it. ``display``: inline or block."""
    return f"formula{display}{latex.strip().encode().hex()}place"


def pages() -> dict[str, str]:
    """Page of the site -> Markdown. The first is that of ``lipkit`` itself."""
    names = runpy.run_path(str(PACKAGE / "__init__.py"))["__all__"]
    packages = {name: _module(name) for name in names if _module(name) is not None}
    table = "".join(f"| [`{name}`]({name}.md) | {_summary(path)} |\n" for name, path in packages.items())
    verbs = _directive("lipkit", [name for name in names if name not in packages], heading_level=2)
    made = {INDEX: f"# Reference\n\n| package | |\n|---|---|\n{table}\n{verbs}"}
    for name, path in packages.items():
        made[f"reference/{name}.md"] = _directive(f"lipkit.{name}", _exported(path))
    return made


def nav() -> list[dict[str, str]]:
    """The section of the navigation that holds the pages."""
    return [{"lipkit" if page == INDEX else Path(page).stem: page} for page in pages()]


def _module(name: str) -> Path | None:
    return next((p for p in (PACKAGE / f"{name}.py", PACKAGE / name / "__init__.py") if p.exists()), None)


def _exported(path: Path) -> list[str]:
    """``__all__``, or the classes and functions that a module without one defines."""
    body = ast.parse(path.read_text()).body
    assigned = [node for node in body if isinstance(node, ast.Assign | ast.AugAssign)]
    lists = [ast.literal_eval(node.value) for node in assigned if ast.unparse(node).startswith("__all__ ")]
    if lists:
        return [name for names in lists for name in names]
    defined = [node.name for node in body if isinstance(node, ast.ClassDef | ast.FunctionDef)]
    return [name for name in defined if not name.startswith("_")]


def _summary(path: Path) -> str:
    paragraph = (ast.get_docstring(ast.parse(path.read_text())) or "").split("\n\n")[0]
    return to_markdown(paragraph, lambda name: name).replace("\n", " ")


def _directive(identifier: str, members: list[str], heading_level: int = 1) -> str:
    options = f"{{heading_level: {heading_level}, members: [{', '.join(members)}]}}"
    return f"::: {identifier}\n    options: {options}\n"


def to_markdown(text: str, resolve: Callable[[str], str]) -> str:
    """A docstring as Markdown: sections as definition lists, roles as links to what ``resolve`` makes of a name."""

    def block(found: re.Match[str]) -> str:
        def item(line: re.Match[str]) -> str:
            mark = ":class:`{}`" if found["title"] == "Raises" else "``{}``"
            return f"    - {', '.join(mark.format(name) for name in line['names'].split(', '))}: "

        if found["verbatim"] is not None:
            colon, language = (":" if found["colons"] else ""), ("python" if found["colons"] == "::" else "text")
            return f"{colon}\n\n```{language}\n{textwrap.dedent(found['verbatim'])}\n```"
        body = found["body"]
        if found["title"] == "Example":
            return textwrap.dedent(body)
        if found["title"] == "Raises":
            body = _NEXT_ERROR.sub(".\n    ", body)
        if found["title"] in ("Args", "Attributes", "Raises"):
            body = _ITEM.sub(item, body)
        return f"{_TITLES.get(found['title'], found['title'])}\n:   {body.lstrip()}"

    def markup(found: re.Match[str]) -> str:
        if found["doctest"] is not None:
            code = found["doctest"].rstrip("\n")
            indent = " " * (len(code) - len(code.lstrip()))
            return f"{indent}```pycon\n{code}\n{indent}```\n"
        if found["display"] is not None:
            return f"{found['indent']}{placeholder(found['display'], 'block')}"
        if found["inline"] is not None:
            return placeholder(found["inline"], "inline")
        if found["target"] is not None:
            name = found["target"]
            shown = name.rpartition(".")[2] if "~" in found[0] else name
            return f'<autoref optional identifier="{resolve(name)}"><code>{shown}</code></autoref>'
        if found["sign"] is not None:
            return "&lt;" if found["sign"] == "<" else f"\\{found['sign']}"
        return found["literal"]

    return _MARKUP.sub(markup, _BLOCK.sub(block, text))


class Reference(Extension):
    """What griffe has read of the package, made ready for the pages."""

    def on_module(self, *, mod: Any, loader: Any, **_: Any) -> None:
        """Called with the package itself when all of it has been read."""
        if mod.parent is None:
            loader.resolve_aliases(implicit=True, external=False)
            modules = [mod]
            for module in modules:
                modules += [m for m in module.members.values() if not m.is_alias and m.is_module]
                _rewrite(module)
            for module in modules:
                _uncover(module)


def _rewrite(obj: Any) -> None:
    """Turn the docstrings of ``obj`` and of what it holds, submodules aside, into Markdown."""

    def resolve(name: str) -> str:
        try:
            return name if name.startswith("lipkit.") else obj.resolve(name)
        except NameResolutionError:
            return f"lipkit.errors.{name}" if name in obj.package["errors"].members else name

    if obj.is_function and any(str(mark.value).startswith("architecture(") for mark in obj.decorators):
        _frame(obj)
    if obj.is_attribute and obj.endlineno - obj.lineno > LONGEST_TABLE:
        obj.value = None
    if obj.docstring is not None:
        obj.docstring.value = to_markdown(obj.docstring.value, resolve)
    for member in obj.members.values():
        if not member.is_alias and not member.is_module:
            _rewrite(member)


def _frame(obj: Any) -> None:
    """Give an architecture the parameters that `lipkit.models.frame.architecture` gives it, and their lines."""
    members = obj.package["models.frame"].members
    given = {argument.name: argument.value for mark in obj.decorators for argument in mark.value.arguments}
    usual = {"input_shape": "(3, 32, 32)", "classes": "10", "lipschitz": "1.0", "mean": "None", "std": "None"}
    own = [p for p in obj.parameters if p.name not in ("image", "common")]
    common = [
        Parameter(
            name, annotation=field.annotation, kind=ParameterKind.keyword_only, default=given.get(name, usual[name])
        )
        for name, field in members["Common"].members.items()
    ]
    order = list(ParameterKind)
    obj.parameters = Parameters(*sorted([*own, *common], key=lambda p: order.index(p.kind)))
    obj.returns = "nn.Sequential"
    lines = ast.literal_eval(str(members["DESCRIBED"].value))
    text = re.sub("^    image: (.*)$", rf"    input_shape: \1\n{lines}", obj.docstring.value, flags=re.M)
    obj.docstring.value = text


def _uncover(module: Any) -> None:
    """A name that is exported is the function, not the submodule of the same name, which griffe puts in its place."""
    for name in module.exports or ():
        hidden = module.members.get(name)
        if hidden is not None and not hidden.is_alias and hidden.is_module and name in hidden.members:
            module.set_member(name, Alias(name, hidden.members[name], parent=module))
