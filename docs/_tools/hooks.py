"""What mkdocs does beside its own work: pages from the root of the repository and of the code, formulas as MathML."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import reference
from latex2mathml.converter import convert
from mkdocs.structure.files import File

ROOT = Path(__file__).parents[2]
# Page of the site -> file of the repository; other files that the pages link to are copied as they are.
PAGES = {"contributing.md": "CONTRIBUTING.md", "changelog.md": "CHANGELOG.md"}
COPIES = ("examples/by_hand.py", "examples/controller.py", "examples/denoiser.py", "examples/verify_onnx.py")
# Code, which is left alone, or a formula: $$ ... $$ or $ ... $, which may go over a line's end.
_CODE = r"^ *```.*?^ *```$|^ {4}[^\n]*$|(?P<ticks>`+)(?!`).+?(?<!`)(?P=ticks)(?!`)|<!--.*?-->"
_INLINE = r"(?<![\\$\w])\$(?P<inline>[^\s$](?:(?:(?!\n\n)[^$])*[^\s$])?)\$(?!\w)"
_FORMULA = re.compile(rf"(?P<code>{_CODE})|\$\$(?P<block>.+?)\$\$|{_INLINE}", re.S | re.M)
# \big\|, which the converter would show as it stands.
_LARGE_NORM = re.compile(r"(\\[bB]igg?)\\\|")
_PLACE = re.compile(r"formula(inline|block)([0-9a-f]+)place")


def on_config(config: Any) -> Any:
    """The section Reference of the navigation."""
    next(section for section in config.nav if "Reference" in section)["Reference"] = reference.nav()
    return config


def on_files(files: Any, config: Any) -> Any:
    """Add the pages and files that do not lie in docs/."""
    for page, source in PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text()))
    for path in COPIES:
        files.append(File.generated(config, path, content=(ROOT / path).read_text()))
    for page, content in reference.pages().items():
        files.append(File.generated(config, page, content=content))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Links that leave docs/, as the repository has them, lead to the copies in the site; formulas are set aside."""
    return _set_aside(_within_the_site(markdown, page))


def _within_the_site(markdown: str, page: Any) -> str:
    if page.file.src_uri == "index.md":  # opens with README, up to the comparison with others
        readme = (ROOT / "README.md").read_text().partition("\n## Beside other libraries")[0]
        markdown = readme + markdown[markdown.index("\n## ") :]
    if page.file.src_uri in (*PAGES, "index.md"):
        return markdown.replace("](docs/", "](")
    up = "../" * page.file.src_uri.count("/")
    for path in COPIES:
        markdown = markdown.replace(f"](../{up}{path})", f"]({up}{path})")
    for target, source in PAGES.items():
        markdown = markdown.replace(f"](../{up}{source})", f"]({up}{target})")
    return markdown


def _set_aside(markdown: str) -> str:
    """A placeholder for each formula: Markdown would read its bars, stars and underscores."""

    def put(found: re.Match[str]) -> str:
        if found["code"] is not None:
            return found[0]
        if found["block"] is not None:
            return reference.placeholder(found["block"], "block")
        return reference.placeholder(found["inline"], "inline")

    return _FORMULA.sub(put, markdown)


def on_page_content(content: str, page: Any, config: Any, files: Any) -> str:
    """Formulas as MathML, which browsers draw without a script."""

    def draw(found: re.Match[str]) -> str:
        latex = bytes.fromhex(found[2]).decode()
        return convert(_LARGE_NORM.sub(r"\1‖", latex), display=found[1])

    return _PLACE.sub(draw, content)
