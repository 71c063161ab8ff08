"""How much a page has to say about a word: the site's search orders its results by this.

Sphinx's own index knows which pages contain a word, and not how often, or whether a page defines
it. This extension counts the words of every page, gives more weight to definitions, headings and
code in the text, and weighs them as BM25 does: a word of few pages counts more, the tenth
occurrence less than the second, and a long page needs more of them. The result is a table of whole
numbers in `_static/relevance.js`, which `scorer.js` adds up for the words of a query.
"""

import json
import math
import re
from collections import Counter, defaultdict
from pathlib import Path

from docutils import nodes
from sphinx import addnodes
from sphinx.search.en import SearchEnglish

# The weight of a word by its place. A page that explains a name has it in its text as code; one
# that uses it, in its cells.
WEIGHTS = {
    "definition": 40,
    "title": 20,
    "heading": 10,
    "code": 6,
    "text": 1,
    "parameter": 1,
    "block": 0.2,
}
SATURATION = 30  # a weighted count that gives half of the score that a page can reach
LENGTH = 0.25  # from 0, where a page's length does not matter, to 1
AFTER_LESSONS = 0.7  # factor of pages for contributors and of lists
NAME = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*")
SCALE = 100  # of the whole numbers in the table
CODE = re.compile(r"[_.\d]")
STEM = SearchEnglish({}).stem  # the one that the page of results has
STOP = set(SearchEnglish.stopwords)
LESSON = re.compile(r"\w+/\d|index$")


def words(text: str) -> list:
    "The names in a text in small letters; a dotted name and its parts; plain words as their stems."
    result = []
    for name in NAME.findall(text.lower()):
        parts = name.split(".") if "." in name else []
        result += [word if CODE.search(word) else STEM(word) for word in (name, *parts)]
    return result


def phrases(text: str) -> list:
    "Neighbouring plain words of a text as their stems, without articles and the like."
    plain = re.findall(r"[a-z]+", text.lower())
    pairs = [pair for pair in zip(plain, plain[1:]) if not STOP.intersection(pair)]
    return [f"{STEM(first)} {STEM(second)}" for first, second in pairs]


PLACES = {
    addnodes.desc_name: "definition",
    addnodes.desc_parameter: "parameter",
    addnodes.literal_strong: "parameter",  # beside its comment
    nodes.literal: "code",
    nodes.literal_block: "block",
}


def place_of(node: nodes.Text) -> str:
    "Where in a page a text stands: a key of WEIGHTS."
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
    "Count the words and phrases of a page, each with the weight of its place."
    counts = Counter()
    for node in doctree.findall(nodes.Text):
        place = place_of(node)
        of_node = words(str(node))
        if place != "block":
            of_node += phrases(str(node))
        for word in of_node:
            counts[word] += WEIGHTS[place]
    once = [word for word, number in counts.items() if " " in word and number < 2]
    for phrase in once:  # most of all phrases
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
    "Write the table: names of pages, and for every word its pages and scores in turn."
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
    "The page of results loads the table."
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
