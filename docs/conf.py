"""Sphinx configuration of the site; build.py prepares the pages."""
import re

from docutils import nodes
from latex2mathml.converter import convert

project = "Longhorn Kit"
author = copyright = "Longhorn Kit contributors"
extensions = ["myst_nb", "sphinx_copybutton"]
html_theme = "furo"
html_title = "Longhorn Kit"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_show_sphinx = False
exclude_patterns = ["**.ipynb_checkpoints"]
myst_enable_extensions = ["dollarmath", "amsmath", "colon_fence"]
myst_heading_anchors = 3
nb_execution_mode = "off"
html_math_renderer = "mathml"
TAG = re.compile(r"\\tag\{([^}]*)\}")


def write_inline_math(translator, node):
    translator.body.append(convert(node.astext()))
    raise nodes.SkipNode


def write_block_math(translator, node):
    # A tag is the equation's number; it stands at the right of the line.
    tag = TAG.search(node.astext())
    number = f'<span class="equation-number">({tag[1]})</span>' if tag else ""
    formula = convert(TAG.sub("", node.astext()), display="block")
    translator.body.append(f'<div class="equation">{formula}{number}</div>')
    raise nodes.SkipNode


def setup(app):
    # MathML is drawn by the browser itself: mathematics is there with the network off.
    app.add_html_math_renderer("mathml", (write_inline_math, None), (write_block_math, None))
