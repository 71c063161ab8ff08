"""Sphinx configuration of the site; build.py prepares the pages."""
from docutils import nodes

project = "Longhorn Kit"
author = copyright = "Longhorn Kit contributors"
extensions = ["myst_nb", "sphinx_copybutton", "sphinx-mathjax-offline"]
html_theme = "furo"
html_title = "Longhorn Kit"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_show_sphinx = False
exclude_patterns = ["**.ipynb_checkpoints"]
myst_enable_extensions = ["dollarmath", "amsmath", "colon_fence"]
myst_heading_anchors = 3
nb_execution_mode = "off"
nb_render_markdown_format = "myst"
# MathJax comes from an installed package, so mathematics is there with the network off.
mathjax3_config = {"tex": {"tags": "none"}, "options": {"enableMenu": False}}


def leave_mathematics_alone(app, doctree):
    "Hand display mathematics to MathJax as it is written; Sphinx would wrap lines in an environment that takes no tag."
    for node in doctree.findall(nodes.math_block):
        if not node.get("no-wrap"):
            node["no-wrap"] = True
            node.children = [nodes.Text(rf"\[{node.astext()}\]")]


def setup(app):
    app.connect("doctree-read", leave_mathematics_alone)
