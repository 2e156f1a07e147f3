"""Configuration of the documentation; it builds without a network."""

import re
import sys
from pathlib import Path
from typing import Any

from docutils import nodes

from wqk import __version__
from wqk._version import ADDRESS

project = "wqk"
author = "The wqk developers"
copyright = author
version = release = __version__

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "sphinx_click",
    "sphinx-mathjax-offline",
]
# Pages for contributors, and pages that others include.
exclude_patterns = [
    "_build",
    "contributing.md",
    "glossary.md",
    "log.md",
    "paper-and-code-examples.md",
    "performance.md",
    "releasing.md",
    "columns.md",
    "conversions.md",
    "derivations.md",
    "quantized.md",
    "quantization-measured.md",
    # Records of single experiments and measurements; pages link to them in the repository.
    "results/all-contrasts.md",
    "results/**/all-contrasts.md",
    "results/collator.md",
    "results/conversion.md",
    "results/directionality.md",
    "results/larger.md",
    "results/linear.md",
    "results/parts.md",
    "results/starts.md",
    "results/table-1.md",
    "theory/bounds.md",
    "theory/counts.md",
    "theory/false-positives.md",
    "theory/gradients.md",
    "theory/growth.md",
    "theory/pairing.md",
    "theory/scores.md",
]

# In docstrings, names in single backticks are links where they are documented.
default_role = "py:obj"
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autosummary_generate = False
napoleon_google_docstring = False
napoleon_use_rtype = False
napoleon_use_param = False  # several parameters with one description stay together
napoleon_attr_annotations = False

myst_enable_extensions = ["colon_fence", "deflist", "dollarmath"]
myst_dmath_double_inline = True
myst_heading_anchors = 3
# Links to files of the repository that are no pages, such as [the log](repo:docs/log.md).
myst_url_schemes = {
    "http": None,
    "https": None,
    "mailto": None,
    "repo": {"url": f"{ADDRESS}/blob/main/{{{{path}}}}#{{{{fragment}}}}", "title": "{{path}}"},
}

# Notebooks are shown as they are kept; tests/test_notebooks.py runs them.
nb_execution_mode = "off"

# Dashes of options stay dashes.
smartquotes = False

html_theme = "furo"
html_title = f"wqk {release}"
html_static_path = ["static"]
html_css_files = ["wqk.css"]
html_js_files = ["filter.js"]  # of the tables of covered models
html_search_scorer = str(Path(__file__).parent / "scorer.js")  # own titles first
html_extra_path = ["extra"]  # llms.txt
html_copy_source = False
html_show_sphinx = False


def keep_colons(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Keep a colon in a property's first line, which napoleon reads as the end of a type.

    Autodoc calls a cached property an attribute.
    """
    if what in ("property", "attribute") and lines and ": " in lines[0]:
        head, tail = lines[0].split(": ", 1)
        lines[:1] = [f"{head}:", tail]


def format_help(app: Any, context: Any, lines: list[str]) -> None:
    """Make the examples in the help of a command a block of code; the rest is plain text."""
    help_lines = []
    is_example = False
    for line in lines:
        if line.strip() in ("| Example:", "| Examples:"):
            is_example = True
            help_lines += [".. code-block:: console", ""]
        elif is_example and line.startswith("|"):
            help_lines.append("   $ " + line.removeprefix("|").strip())
        else:
            is_example = False
            help_lines.append(line.replace("*", r"\*"))
    lines[:] = help_lines


def shorten_signature(
    app: Any,
    what: str,
    name: str,
    obj: Any,
    options: Any,
    signature: str | None,
    returns: str | None,
) -> tuple[str, str | None] | None:
    """Leave private fields and the defaults of mutable fields out of a class's signature."""
    if what != "class" or not signature or "<factory>" not in signature:
        return None
    signature = re.sub(r", _\w+: [^=]*?\s*=\s*<factory>", "", signature)
    return signature.replace("<factory>", "..."), returns


def skip_fields(app: Any, what: str, name: str, obj: Any, skip: bool, options: Any) -> bool | None:
    """Leave out the fields of named tuples, which the docstring of their class describes."""
    return True if type(obj).__name__ == "_tuplegetter" else None


def write_coverage(app: Any) -> None:
    """Write what is made from data before pages are looked for."""
    folder = Path(app.confdir)
    sys.path.insert(0, str(folder))
    try:
        from generate_columns import write as write_columns
        from generate_conversions import write as write_conversions
        from generate_coverage import write
        from generate_quantized import write as write_quantized
        from generate_results import write_contrasts
    finally:
        sys.path.pop(0)
    write(folder / "coverage.md")
    write_columns(folder / "columns.md")
    write_conversions(folder / "conversions.md")
    write_quantized(folder / "quantized.md")
    write_contrasts()


# Cells of at most, and of more than this number of characters: `short` and `long` in wqk.css.
SHORT_CELL, LONG_CELL = 12, 24
# Words of code of more characters may be wider than a phone's column; `long` in wqk.css.
LONGEST_WHOLE_WORD = 28


def mark_cells(app: Any, doctree: nodes.document, page: str) -> None:
    """Mark the cells of tables whose columns can be narrow, and those that need a wide one."""
    for cell in doctree.findall(nodes.entry):
        length = len(cell.astext())
        if length <= SHORT_CELL:
            cell["classes"].append("short")
        elif length > LONG_CELL:
            cell["classes"].append("long")


# What the theme's and Sphinx's HTML lacks for screen readers and keyboards.
ACCESSIBLE = {
    'role="heading"><span': 'role="heading" aria-level="2"><span',
    '<aside class="sidebar-drawer">': '<aside class="sidebar-drawer" aria-label="Pages">',
    '<aside class="toc-drawer">': '<aside class="toc-drawer" aria-label="On this page">',
    "<pre>": '<pre tabindex="0">',
    '<div class="table-wrapper ': '<div tabindex="0" role="group" aria-label="Table" '
    'class="table-wrapper ',
    "<noscript>": '<h1 class="visually-hidden">Search</h1><noscript>',
}
WIDE_PICTURE = re.compile(r'<img [^>]*(?:class="paper"|style="width: \d+%;")[^>]*>')
SCROLLED = '<span class="scrolled" tabindex="0" role="group" aria-label="Picture">{}</span>'
# Between a name and its description, a dash instead of two hyphens.
HYPHENS = re.compile(r"(</(?:strong|em|a)>\)?) -- ")
# A word of code, and the empty lines that end the examples of a session.
CODE_WORD = re.compile(rf'<span class="pre">(?=[^<]{{{LONGEST_WHOLE_WORD + 1},}}<)')
EMPTY_LINES = re.compile(r"\n{2,}</pre>")
# A corner of a table above row names is no heading.
EMPTY_HEADING = re.compile(r'<th class="head[^"]*"><p></p></th>')


def make_accessible(app: Any, exception: Exception | None) -> None:
    """Complete the attributes of the pages that were written."""
    for page in Path(app.outdir).rglob("*.html") if exception is None else ():
        text = before = page.read_text(encoding="utf-8")
        for markup, replacement in ACCESSIBLE.items():
            text = text.replace(markup, replacement)
        if 'class="scrolled"' not in text:
            text = WIDE_PICTURE.sub(lambda match: SCROLLED.format(match[0]), text)
        text = EMPTY_HEADING.sub("<td></td>", text)
        text = HYPHENS.sub(r"\1 – ", text)
        text = CODE_WORD.sub('<span class="pre long">', text)
        text = EMPTY_LINES.sub("\n</pre>", text)
        if text != before:
            page.write_text(text, encoding="utf-8")


def setup(app: Any) -> None:
    app.connect("build-finished", make_accessible)
    app.connect("builder-inited", write_coverage)
    app.connect("doctree-resolved", mark_cells)
    app.connect("sphinx-click-process-description", format_help)
    app.connect("autodoc-process-docstring", keep_colons, priority=400)
    app.connect("autodoc-process-signature", shorten_signature)
    app.connect("autodoc-skip-member", skip_fields)
