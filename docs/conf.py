"""Sphinx configuration of the site.

build.py prepares the pages and writes the link targets to names.json.
"""

import json
import re
from functools import cache
from pathlib import Path

from docutils import nodes
from docutils.parsers.rst import Parser
from docutils.utils import new_document
from sphinx import addnodes
from sphinx.pycode import ModuleAnalyzer
from sphinx.util.docutils import SphinxDirective

import api
from build import COMMIT, REPOSITORY, ROOT

project = html_title = "Longhorn Kit"
author = copyright = "Longhorn Kit contributors"
extensions = [
    "myst_nb",
    "sphinx_copybutton",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.linkcode",
    "sphinx-mathjax-offline",
    "relevance",
]
html_theme = "furo"
html_theme_options = {
    "top_of_page_buttons": [],
    "light_css_variables": {"code-font-size": "0.78rem", "figure-filter": "none"},
    "dark_css_variables": {"figure-filter": "invert(0.94) hue-rotate(180deg) brightness(1.25)"},
}
html_search_scorer = str(ROOT / "docs" / "scorer.js")
html_static_path = ["static"]
html_css_files = ["site.css"]
html_js_files = ["site.js"]
html_favicon = "static/mark.svg"
html_show_sphinx = html_copy_source = html_use_index = False
html_domain_indices = False
pygments_style = "a11y-high-contrast-light"
pygments_dark_style = "github-dark"
exclude_patterns = ["**.ipynb_checkpoints"]
add_module_names = toc_object_entries = False
smartquotes_action = "qe"  # no dashes, so that `--steps` stays unchanged
maximum_signature_line_length = 84
myst_enable_extensions = ["dollarmath", "amsmath", "colon_fence"]
myst_heading_anchors = 3
nb_execution_mode = "off"
nb_render_markdown_format = "myst"
nb_ipywidgets_js = {}  # sliders need a kernel, and their scripts would be downloaded
nb_mime_priority_overrides = [("html", "application/vnd.jupyter.widget-view+json", None)]
autodoc_typehints = "description"  # types stand beside the comments of the parameters
autodoc_typehints_description_target = "documented_params"
autodoc_member_order = "bysource"
autodoc_inherit_docstrings = False
autosummary_generate = False  # the pages are the notebooks
copybutton_selector = "div.highlight:not(.output *) pre"
# MathJax comes from an installed package, so mathematics works offline
mathjax3_config = {"tex": {"tags": "none"}, "options": {"enableMenu": False}}

EQUATION = re.compile(r"\((\d{1,2})\)(?=((?:\s?(?:–|-|,|and|to)\s?\(\d+\))*) ?)")
ARXIV = re.compile(r"arXiv[: ](\d{4}\.\d{4,5})")
NAME = re.compile(r"([A-Za-z_][\w.]*)(\(.*\))?")
NAMES = {}
LAST = {}  # last word of a definition's name -> full names


def source_of(module):
    return (ROOT / f"{module.replace('.', '/')}.py").read_text(encoding="utf-8")


def linkcode_resolve(domain, info):
    """Return the address of a documented name's source.

    This is its line in the generated module, once the repository is published."""
    if not REPOSITORY:
        return None
    module, name = info["module"], info["fullname"]
    first = name.partition(".")[0]
    if module == "longhorn_kit" and first in NAMES["public"]:
        module = NAMES["public"][first].rpartition(".")[0]
    place = f"{REPOSITORY}/blob/{COMMIT}/{module.replace('.', '/')}.py"
    if module not in NAMES["modules"]:
        return place
    _, line, _ = (
        ModuleAnalyzer.for_string(source_of(module), module).find_tags().get(name, ("", 1, 1))
    )
    return f"{place}#L{line}"


class Restructured(SphinxDirective):
    """Directive for reStructuredText in MyST.

    MyST's `eval-rst` inserts 10,000 empty lines per cell of the notebook before the text."""

    has_content = True

    def run(self):
        document = new_document(self.env.docname, self.state.document.settings)
        document.reporter = self.state.document.reporter
        Parser().parse("\n".join(self.content), document)
        return document.children


@cache
def entries_of(module):
    "Return name -> entry of a module of the package; {} for other modules."
    if module not in NAMES["modules"]:
        return {}
    entries = api.exported(source_of(module), module)
    return {item.name: item for entry in entries for item in (entry, *entry.members)}


def entry_of(thing):
    "Return the entry of an object by the place of its definition, or None if it has no entry."
    thing = getattr(thing, "fget", None) or getattr(thing, "func", thing)  # function of a property
    module, name = getattr(thing, "__module__", ""), getattr(thing, "__qualname__", "")
    return entries_of(module).get(name)


def comments_of(what, thing, entry):
    "Return parameter -> comment; a class without a constructor uses those of its base."
    bases = [entry_of(kind) for kind in thing.__mro__] if what == "class" else []
    comments = next((base.comments for base in [entry, *bases] if base and base.comments), {})
    if what == "method" and entry.kind == "function":  # a function that became a method
        comments = dict(list(comments.items())[1:])
    return comments


def with_comments(app, what, name, thing, options, lines):
    """Pass to autodoc the docstring and the comment beside every parameter in the source.

    The comment contains the parameter's shape and meaning."""
    if what == "data":  # otherwise autodoc shows the docstring of `dict`
        lines[:] = ["Name -> class of every layer; a key is the ``mixer`` of an ``LMConfig``.", ""]
        return
    entry = entry_of(thing)
    if entry is None:
        return
    lines[:] = [*api.restructured(entry.doc).splitlines(), ""]
    for parameter, comment in comments_of(what, thing, entry).items():
        lines.append(f":param {parameter}: {api.restructured(comment)}")
    if entry.returns:
        lines.append(f":returns: {api.restructured(entry.returns)}")
    lines.append("")


def without_entry(app, what, name, thing, skip, options):
    "Skip members without an entry."
    return isinstance(thing, type) or entry_of(thing) is None


def fold_parameters(app, doctree, doc):
    """Fold parameters behind a line that opens them.

    They are open for public names and on the page of the package."""
    for text in list(doctree.findall(nodes.Text)):
        if text == " -- ":  # between a parameter and its comment
            text.parent.replace(text, nodes.Text(" – "))
    if doc == "api":
        return
    for content in doctree.findall(addnodes.desc_content):
        shown = set(content.parent[0].get("ids", ())) & set(NAMES["public"].values())
        for fields in [child for child in content.children if isinstance(child, nodes.field_list)]:
            start = f'<details class="api"{" open" if shown else ""}><summary>Parameters</summary>'
            fields.replace_self(
                [
                    nodes.raw("", start, format="html"),
                    fields,
                    nodes.raw("", "</details>", format="html"),
                ]
            )


def leave_mathematics_alone(app, doctree):
    """Pass display mathematics to MathJax unchanged.

    Sphinx would wrap lines in an environment that allows no tag."""
    for node in doctree.findall(nodes.math_block):
        if not node.get("no-wrap"):
            text = node.astext()
            node["no-wrap"] = True
            node["ids"] += [f"equation-{tag}" for tag in re.findall(r"\\tag\{(\w+)\}", text)]
            node.children = [nodes.Text(rf"\[{text}\]")]


def only_pictures_have_captions(app, doctree):
    "Remove captions from tables and texts; MyST-NB adds one to every output of a cell."
    for figure in list(doctree.findall(nodes.figure)):
        if not any(figure.findall(nodes.image)):
            figure.replace_self(
                [child for child in figure.children if not isinstance(child, nodes.caption)]
            )


def definition(text, doc):
    "Return (page, anchor) of the definition that a name in backticks refers to, or None."
    match = NAME.fullmatch(text)
    if not match or len(match[1]) < 3:
        return None
    name = match[1].rstrip(".")
    known = NAMES["definitions"]
    imported = NAMES["imports"].get(doc, {})
    own = next((m for m, d in NAMES["modules"].items() if d == doc), None)
    for full in (imported.get(name), f"{own}.{name}", name, f"longhorn_kit.{name}"):
        if full in known:
            return known[full], full
        if full in NAMES["modules"] and "." in name:
            return NAMES["modules"][full], ""
    telling = "_" in name or "." in name or name != name.lower() or match[2] or name in imported
    found = (
        [full for full in LAST.get(name.split(".")[-1], ()) if full.endswith("." + name)]
        if telling
        else []
    )
    if "." not in name:  # methods need the class name, because their names are common words
        found = [full for full in found if full.removesuffix("." + name) in NAMES["modules"]]
    return (known[found[0]], found[0]) if len(found) == 1 else None


def link(app, doc, target, anchor, *content):
    "Return a reference node to an anchor of a page."
    uri = "" if target == doc else app.builder.get_relative_uri(doc, target)
    return nodes.reference(
        "", "", *content, internal=True, refuri=f"{uri}#{anchor}" if anchor else uri or "#"
    )


def inside(node, *kinds):
    while node := node.parent:
        if isinstance(node, kinds):
            return True
    return False


def link_names(app, doctree, doc):
    "Link names of the package in backticks to their definitions."
    for node in list(doctree.findall(nodes.literal)):
        if inside(node, nodes.reference, nodes.title, addnodes.desc_signature):
            continue
        if found := definition(node.astext(), doc):
            node.replace_self(link(app, doc, *found, node.deepcopy()))


def page_after(node, doc):
    "Return the target page of the link after this text."
    after = node.next_node(descend=False, siblings=True)
    uri = (
        after.get("refuri", "")
        if isinstance(after, nodes.reference) and after.get("internal")
        else ""
    )
    return next(
        (d for d in NAMES["equations"] if uri and d.endswith(Path(uri.split("#")[0]).stem)), None
    )


def link_numbers(app, doctree, doc):
    """Link (3) to the equation with this number, on this page or on the page that is named next.

    arXiv numbers are linked to the references."""
    skip = (
        nodes.literal,
        nodes.literal_block,
        nodes.math,
        nodes.math_block,
        nodes.reference,
        nodes.title,
        nodes.raw,
        addnodes.desc_signature,
    )
    for node in list(doctree.findall(nodes.Text)):
        text = str(node)
        pieces = []
        done = 0
        if inside(node, *skip):
            continue
        for match in sorted(
            [*EQUATION.finditer(text), *ARXIV.finditer(text)], key=lambda m: m.start()
        ):
            if match.re is ARXIV:
                target = "references"
                anchor = f"arxiv-{match[1]}"
            else:
                elsewhere = text[match.end() + len(match[2]) :] == " of " and page_after(node, doc)
                target = elsewhere or doc
                anchor = f"equation-{match[1]}"
                if match[1] not in NAMES["equations"].get(target, []):
                    continue
            pieces += [
                nodes.Text(text[done : match.start()]),
                link(app, doc, target, anchor, nodes.Text(match[0])),
            ]
            done = match.end()
        if pieces:
            parent = node.parent
            place = node.parent.index(node)
            parent.children[place : place + 1] = []
            parent.insert(place, [*pieces, nodes.Text(text[done:])])


def one_anchor_an_equation(app, doctree, doc):
    "Remove an equation's second anchor, which the theme adds to the box around it."
    for box in doctree.findall(nodes.container):
        if "math-wrapper" in box["classes"]:
            box["ids"] = []


LINES = re.compile(r'<dl>\s*((?:<dd>.*?</dd>\s*)+)</dl>(?=\s*<span class="sig-paren">)', re.S)


def for_screen_readers(app, name, template, context, doctree):
    """Correct the HTML of Sphinx, its theme and myst-nb for screen readers.

    The corrections concern names that hide a text, headings without a level, and lists of one
    kind."""

    def lines(match):
        return f"<div>{match[1].replace('<dd>', '<div>').replace('</dd>', '</div>')}</div>"

    context["body"] = LINES.sub(
        lines, context.get("body", "").replace(' aria-label="Toggle hidden content"', "")
    )
    tree = context.get("furo_navigation_tree", "")
    context["furo_navigation_tree"] = tree.replace(
        'role="heading"', 'role="heading" aria-level="2"'
    )


def setup(app):
    NAMES.update(json.loads((Path(app.srcdir).parent / "names.json").read_text(encoding="utf-8")))
    for full in NAMES["definitions"]:
        LAST.setdefault(full.split(".")[-1], []).append(full)
    app.add_directive("rst", Restructured)
    app.connect("autodoc-process-docstring", with_comments)
    app.connect("autodoc-skip-member", without_entry)
    app.connect("doctree-read", leave_mathematics_alone)
    app.connect("doctree-read", only_pictures_have_captions)
    for step in (fold_parameters, link_names, link_numbers, one_anchor_an_equation):
        app.connect("doctree-resolved", step)
    app.connect("html-page-context", for_screen_readers, priority=900)  # after the theme
    app.connect("build-finished", drop_unused_mathjax)


def drop_unused_mathjax(app, error):
    "Delete all MathJax bundles except the one that pages load; they are most of the site's size."
    folder = Path(app.outdir) / "_static" / "mathjax"
    keep = {"tex-chtml.js"}
    for file in folder.glob("*.js"):
        if file.name not in keep:
            file.unlink()
