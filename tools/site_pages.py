"""Pages of the site that are not in docs/: a hook of mkdocs, see mkdocs.yml.

- index.md, contributing.md and changelog.md are the README, CONTRIBUTING.md and CHANGELOG.md.
- api/ has a page for each public module, with an entry for every name of its `__all__`. Names are
  read from the source, nothing of thinwire is imported.
- source/ has a page for each file of the repository outside of docs/ that a document links to. The
  site has no address of a repository to link to, and so a reader of the site alone sees them too.

Links are written as GitHub reads them, relative to the file they are in, and rewritten here. One
that leads nowhere stays as it is, and mkdocs refuses it.
"""

import os
import re
from functools import cache
from pathlib import Path

import griffe
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
# Site page -> file at the root of the repository.
PAGES = {
    "index.md": "README.md",
    "contributing.md": "CONTRIBUTING.md",
    "changelog.md": "CHANGELOG.md",
}
LANGUAGES = {".py": "python", ".toml": "toml", ".sh": "bash", ".yml": "yaml", ".yaml": "yaml"}
_LINK = re.compile(r"(?<!!)\]\((?P<target>[^)\s#]+)(?P<anchor>#[^)\s]*)?\)")
# A list right after a line of text or of a table: GitHub reads it, Python-Markdown wants a gap.
_LIST = re.compile(r"^((?![-*] |\s|\d+\. |#).+\n)([-*] )", re.MULTILINE)
_FENCE = re.compile(r"^(```.*?^```[^\n]*$)", re.MULTILINE | re.DOTALL)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Puts the pages of the API reference in the place that the navigation keeps for them."""
    for entry in config.nav or []:
        for title, target in entry.items():
            if target == "api/":
                entry[title] = [{module: f"api/{page}.md"} for page, module in modules().items()]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    made = {page: (ROOT / file).read_text() for page, file in PAGES.items()}
    made |= {f"api/{page}.md": reference(module) for page, module in modules().items()}
    texts = {file.src_uri: file.content_string for file in files.documentation_pages()}
    for page, text in {**texts, **made}.items():
        for path in linked_files(page, text):
            made[source_page(path)] = listing(path)
    for page, text in made.items():
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    here = page.file.src_uri
    if here.startswith(("api/", "source/")):
        return markdown

    def rewritten(match: re.Match[str]) -> str:
        target = site_page(here, match["target"])
        return match[0] if target is None else f"]({target}{match['anchor'] or ''})"

    parts = _FENCE.split(markdown)  # every second one is a block of code
    return "".join(
        part if number % 2 else _LIST.sub(r"\1\n\2", _LINK.sub(rewritten, part))
        for number, part in enumerate(parts)
    )


# -- links -----------------------------------------------------------------------------------------


def repository_path(page: str, target: str) -> str | None:
    """The file of the repository that a link of this page means; None for addresses and nothing."""
    if ":" in target:
        return None
    source = ROOT / PAGES[page] if page in PAGES else ROOT / "docs" / page
    path = (source.parent / target).resolve()
    return path.relative_to(ROOT).as_posix() if path.is_file() and ROOT in path.parents else None


def linked_files(page: str, text: str) -> list[str]:
    """Files of the repository that the page links to and that have no page of their own."""
    found = [repository_path(page, match["target"]) for match in _LINK.finditer(text)]
    return [p for p in found if p and not p.startswith("docs/") and p not in PAGES.values()]


def site_page(page: str, target: str) -> str | None:
    path = repository_path(page, target)
    if path is None:
        return None
    own = {file: name for name, file in PAGES.items()}
    to = path.removeprefix("docs/") if path.startswith("docs/") else own.get(path)
    return os.path.relpath(to or source_page(path), os.path.dirname(page) or ".")


def source_page(path: str) -> str:
    return f"source/{path}.md"


def listing(path: str) -> str:
    fence = "````"
    language = LANGUAGES.get(Path(path).suffix, "text")
    return f"# {path}\n\n{fence}{language}\n{(ROOT / path).read_text()}{fence}\n"


# -- the API reference -----------------------------------------------------------------------------


@cache
def package() -> griffe.Object | griffe.Alias:
    return griffe.load("thinwire", search_paths=[str(ROOT / "src")], resolve_aliases=True)


@cache
def modules() -> dict[str, str]:
    """Page of api/ -> module: thinwire, its wire, and the modules among its public names."""
    found = {"thinwire": "thinwire", "wire": "thinwire.wire"}
    for name in public_names("thinwire"):
        if package()[name].is_module and not hidden_by_its_module(name):
            found[name] = package()[name].canonical_path
    return found


def hidden_by_its_module(name: str) -> bool:
    """Whether it is a function or class in a module of the same name, which griffe finds first."""
    return bool(package()[name].is_module and name in package()[name].members)


def public_names(module: str) -> list[str]:
    """`__all__`, or, where a module has none, its own functions and classes."""
    found = package() if module == "thinwire" else package()[module.removeprefix("thinwire.")]
    if found.exports is not None:
        return [str(name) for name in found.exports]
    own = (member for member in found.members.values() if not member.is_alias)
    return [m.name for m in own if m.is_public and (m.is_function or m.is_class)]


def reference(module: str) -> str:
    """A page in the language of mkdocstrings, with an entry for each public name."""
    lines = [f"# {module}\n", f"::: {module}\n    options:\n      members: false"]
    lines[1] += "\n      show_root_heading: false\n      show_root_toc_entry: false\n"
    for name in public_names(module):
        if name in modules():
            lines.append(f"## {name}\n\nA module: [{name}]({name}.md).\n")
        else:
            hidden = module == "thinwire" and hidden_by_its_module(name)
            path = f"{package()[name].canonical_path}.{name}" if hidden else f"{module}.{name}"
            lines.append(f"::: {path}\n")
    return "\n".join(lines)
