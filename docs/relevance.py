"""Score the relevance of every page for every word, by which the site's search sorts its results.

Sphinx's index lists the pages that contain a word, but not how often, or whether a page defines it.
This extension counts the words of every page, gives more weight to definitions, headings and code
in the text, and weighs the counts as BM25 does. A word on few pages counts more, the tenth
occurrence counts less than the second, and a long page needs more occurrences. The result is a
table of integers in `_static/relevance.js`, which `scorer.js` adds up for the words of a query.
"""

import json
import math
import re
from collections import Counter, defaultdict
from pathlib import Path

from docutils import nodes
from sphinx import addnodes
from sphinx.search.en import SearchEnglish

# Weight of a word by its place. A page that explains a name contains it as code in its text; a page
# that uses the name contains it in its cells.
WEIGHTS = {
    "definition": 40,
    "title": 20,
    "heading": 10,
    "code": 6,
    "text": 1,
    "parameter": 1,
    "block": 0.2,
}
SATURATION = 30  # weighted count that gives half of the highest possible score
LENGTH = 0.25  # influence of a page's length, from 0 (none) to 1
AFTER_LESSONS = 0.7  # factor for pages for contributors and for lists
NAME = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*")
SCALE = 100  # scale of the integers in the table
CODE = re.compile(r"[_.\d]")
STEM = SearchEnglish({}).stem  # the same stemmer as on the page of results
STOP = set(SearchEnglish.stopwords)
LESSON = re.compile(r"\w+/\d|index$")


def words(text: str) -> list:
    "Return lower-case names of a text, dotted names with their parts, and stems of plain words."
    result = []
    for name in NAME.findall(text.lower()):
        parts = name.split(".") if "." in name else []
        result += [word if CODE.search(word) else STEM(word) for word in (name, *parts)]
    return result


def phrases(text: str) -> list:
    "Return stems of adjacent plain words of a text, without articles and other stop words."
    plain = re.findall(r"[a-z]+", text.lower())
    pairs = [pair for pair in zip(plain, plain[1:]) if not STOP.intersection(pair)]
    return [f"{STEM(first)} {STEM(second)}" for first, second in pairs]


PLACES = {
    addnodes.desc_name: "definition",
    addnodes.desc_parameter: "parameter",
    addnodes.literal_strong: "parameter",  # parameter with a comment
    nodes.literal: "code",
    nodes.literal_block: "block",
}


def place_of(node: nodes.Text) -> str:
    "Return the place of a text in its page, a key of WEIGHTS."
    parent = node.parent
    while parent is not None:
        if type(parent) in PLACES:
            return PLACES[type(parent)]
        if isinstance(parent, nodes.title):
            is_page = isinstance(parent.parent.parent, nodes.document)
            return "title" if is_page else "heading"
        parent = parent.parent
    return "text"


def count(app, doctree) -> None:
    "Count the words and phrases of a page, weighted by their places."
    counts = Counter()
    for node in doctree.findall(nodes.Text):
        place = place_of(node)
        of_node = words(str(node))
        if place != "block":
            of_node += phrases(str(node))
        for word in of_node:
            counts[word] += WEIGHTS[place]
    once = [word for word, number in counts.items() if " " in word and number < 2]
    for phrase in once:  # most phrases occur once
        del counts[phrase]
    app.env.longhorn_words[app.env.docname] = counts


def scores(counts: dict) -> dict:  # page -> weighted counts of its words
    "Return word -> {page: score}."
    pages = defaultdict(dict)
    for page, of_page in counts.items():
        for word, number in of_page.items():
            pages[word][page] = number
    lengths = {page: sum(of_page.values()) for page, of_page in counts.items()}
    mean = sum(lengths.values()) / len(lengths)
    result = defaultdict(dict)
    for word, of_word in pages.items():
        rare = math.log(1 + (len(counts) - len(of_word) + 0.5) / (len(of_word) + 0.5))
        for page, number in of_word.items():
            half = SATURATION * (1 - LENGTH + LENGTH * lengths[page] / mean)
            factor = 1 if LESSON.match(page) else AFTER_LESSONS
            if score := round(SCALE * factor * rare * number / (number + half)):
                result[word][page] = score
    return result


def write(app, error) -> None:
    "Write the table: page names, and for every word alternating pages and scores."
    if error or app.builder.name != "html":
        return
    table = scores(app.env.longhorn_words)
    names = sorted(app.env.longhorn_words)
    numbers = {name: number for number, name in enumerate(names)}
    flat = {
        word: [value for name, score in sorted(of.items()) for value in (numbers[name], score)]
        for word, of in sorted(table.items())
    }
    text = json.dumps({"pages": names, "words": flat}, separators=(",", ":"))
    (Path(app.outdir) / "_static" / "relevance.js").write_text(f"const RELEVANCE = {text};\n")


def load(app, name, template, context, doctree) -> None:
    "Load the table on the page of results."
    if name == "search":
        app.add_js_file("relevance.js")


def start(app) -> None:
    app.env.longhorn_words = {}


def setup(app) -> dict:
    app.connect("builder-inited", start)
    app.connect("doctree-read", count)
    app.connect("html-page-context", load)
    app.connect("build-finished", write)
    return {"parallel_read_safe": False}
