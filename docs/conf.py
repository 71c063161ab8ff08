"""Sphinx configuration of the site; build.py prepares the pages and says in names.json what they can link to."""

import json
import re
from pathlib import Path

from docutils import nodes
from sphinx import addnodes

from build import COMMIT, REPOSITORY

project = html_title = "Longhorn Kit"
author = copyright = "Longhorn Kit contributors"
extensions = ["myst_nb", "sphinx_copybutton", "sphinx.ext.linkcode", "sphinx-mathjax-offline"]
html_theme = "furo"
html_theme_options = {"top_of_page_buttons": []}
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
smartquotes_action = "qe"  # no dashes: `--steps` stays what is typed
maximum_signature_line_length = 84
myst_enable_extensions = ["dollarmath", "amsmath", "colon_fence"]
myst_heading_anchors = 3
nb_execution_mode = "off"
nb_render_markdown_format = "myst"
nb_ipywidgets_js = {}  # sliders need a kernel, and their scripts would come from the network
nb_mime_priority_overrides = [("html", "application/vnd.jupyter.widget-view+json", None)]
copybutton_selector = "div.highlight:not(.output *) pre"
# MathJax comes from an installed package, so mathematics is there with the network off.
mathjax3_config = {"tex": {"tags": "none"}, "options": {"enableMenu": False}}

EQUATION = re.compile(r"\((\d{1,2})\)(?=((?:\s?(?:–|-|,|and|to)\s?\(\d+\))*) ?)")
ARXIV = re.compile(r"arXiv[: ](\d{4}\.\d{4,5})")
NAME = re.compile(r"([A-Za-z_][\w.]*)(\(.*\))?")
NAMES = {}
LAST = {}  # last word of a definition's name -> full names


def linkcode_resolve(domain, info):
    "Where the source of a documented name is: its line in the generated module, once the repository is published."
    line = NAMES["lines"].get(f"{info['module']}.{info['fullname']}")
    path = info["module"].replace(".", "/")
    return (
        f"{REPOSITORY}/blob/{COMMIT}/{path}.py" + (f"#L{line}" if line else "")
        if REPOSITORY
        else None
    )


def leave_mathematics_alone(app, doctree):
    "Hand display mathematics to MathJax as it is written; Sphinx would wrap lines in an environment that takes no tag."
    for node in doctree.findall(nodes.math_block):
        if not node.get("no-wrap"):
            text = node.astext()
            node["no-wrap"] = True
            node["ids"] += [f"equation-{tag}" for tag in re.findall(r"\\tag\{(\w+)\}", text)]
            node.children = [nodes.Text(rf"\[{text}\]")]


def only_pictures_have_captions(app, doctree):
    "Take from tables and texts the caption that MyST-NB gives to every output of a cell."
    for figure in list(doctree.findall(nodes.figure)):
        if not any(figure.findall(nodes.image)):
            figure.replace_self(
                [child for child in figure.children if not isinstance(child, nodes.caption)]
            )


def definition(text, doc):
    "(page, anchor) of what a name in backticks means on this page, or None."
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
    if "." not in name:  # a method is too common a word to be meant by its name alone
        found = [full for full in found if full.removesuffix("." + name) in NAMES["modules"]]
    return (known[found[0]], found[0]) if len(found) == 1 else None


def link(app, doc, target, anchor, *content):
    "A reference node to an anchor of a page."
    uri = "" if target == doc else app.builder.get_relative_uri(doc, target)
    return nodes.reference(
        "", "", *content, internal=True, refuri=f"{uri}#{anchor}" if anchor else uri or "#"
    )


def inside(node, *kinds):
    while node := node.parent:
        if isinstance(node, kinds):
            return True
    return False


def names_a_parameter(node):
    "Does this literal stand in the first column of an entry's table of parameters?"
    while node and not isinstance(node, nodes.entry):
        node = node.parent
    return bool(node) and node.parent.index(node) == 0 and inside(node, addnodes.desc_content)


def link_names(app, doctree, doc):
    "Names of the package in backticks lead to their definition."
    for node in list(doctree.findall(nodes.literal)):
        if inside(node, nodes.reference, nodes.title, addnodes.desc_signature) or names_a_parameter(
            node
        ):
            continue
        if found := definition(node.astext(), doc):
            node.replace_self(link(app, doc, *found, node.deepcopy()))


def page_after(node, doc):
    "The page that the link after this text leads to."
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
    "(3) leads to the equation with this number, of this page or of the one named next; arXiv numbers to the references."
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
    "The theme's box around an equation has its anchor as well; one is enough."
    for box in doctree.findall(nodes.container):
        if "math-wrapper" in box["classes"]:
            box["ids"] = []


LINES = re.compile(r'<dl>\s*((?:<dd>.*?</dd>\s*)+)</dl>(?=\s*<span class="sig-paren">)', re.S)


def for_screen_readers(app, name, template, context, doctree):
    "Mend what Sphinx, its theme and myst-nb write: names that hide a text, headings without a level, lists of one kind."

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
    app.connect("doctree-read", leave_mathematics_alone)
    app.connect("doctree-read", only_pictures_have_captions)
    for step in (link_names, link_numbers, one_anchor_an_equation):
        app.connect("doctree-resolved", step)
    app.connect("html-page-context", for_screen_readers, priority=900)  # after the theme
    app.connect("build-finished", drop_unused_mathjax)


def drop_unused_mathjax(app, error):
    "The pages load one of MathJax's bundles; the others are most of the site's size."
    folder = Path(app.outdir) / "_static" / "mathjax"
    keep = {"tex-chtml.js"}
    for file in folder.glob("*.js"):
        if file.name not in keep:
            file.unlink()
