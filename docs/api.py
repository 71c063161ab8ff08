"""Read from its source what a notebook exports: names, signatures, the comments beside the parameters.

Nothing is imported, so the site can be built where PyTorch cannot run, and in seconds.
"""
import ast
import io
import re
import tokenize
from dataclasses import dataclass, field
from functools import cache


@dataclass
class Entry:
    "A public function, class, method or constant of the package."
    kind: str             # "function", "class", "method", "property" or "data"
    module: str           # "longhorn_kit.scan.op"
    name: str             # "longhorn_scan", "SequenceLM.generate"
    signature: str = ""   # "(q, k, x, b, b_bias=None)"
    doc: str = ""         # docstring
    rows: list = field(default_factory=list)    # (name, default, type, comment) of parameters or fields
    returns: tuple = ("", "")                   # (type, comment)
    members: list = field(default_factory=list) # methods of a class

    @property
    def full_name(self):
        return f"{self.module}.{self.name}"


def comments(source: str) -> dict:
    "Line number -> text of its comment; a line that holds a comment alone continues the one above."
    found, alone = {}, set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            found[token.start[0]] = token.string.lstrip("# ").rstrip()
            if not token.line[:token.start[1]].strip():
                alone.add(token.start[0])
    for line in sorted(alone, reverse=True):
        if line - 1 in found:
            found[line - 1] += " " + found.pop(line)
        else:
            found.pop(line)
    return found


def source_of(node) -> str:
    return "" if node is None else ast.unparse(node)


def rows_of_arguments(arguments: ast.arguments, notes: dict, skip_first: bool) -> list:
    "Return one row per parameter: (name, default, type, comment). Parameters on one line share its comment."
    plain = arguments.posonlyargs + arguments.args
    defaults = [None] * (len(plain) - len(arguments.defaults)) + arguments.defaults
    listed = [("", *pair) for pair in zip(plain, defaults)][skip_first:]
    listed += [("*", arguments.vararg, None)] if arguments.vararg else []
    listed += [("", *pair) for pair in zip(arguments.kwonlyargs, arguments.kw_defaults)]
    listed += [("**", arguments.kwarg, None)] if arguments.kwarg else []
    return [(stars + arg.arg, source_of(default), source_of(arg.annotation),
             notes.get((default or arg).end_lineno, notes.get(arg.lineno, "")))
            for stars, arg, default in listed]


def signature(arguments: ast.arguments, skip_first: bool) -> str:
    "The parameters with their defaults and without their types, which the table has."
    bare = ast.parse(f"def f({ast.unparse(arguments)}): pass").body[0].args
    everything = [*bare.posonlyargs, *bare.args, *bare.kwonlyargs, bare.vararg, bare.kwarg]
    for arg in filter(None, everything):
        arg.annotation = None
    if skip_first:
        (bare.posonlyargs or bare.args).pop(0)
        bare.defaults = bare.defaults[-len(bare.args + bare.posonlyargs):] if bare.args + bare.posonlyargs else []
    return f"({ast.unparse(bare)})"


def decorators(node) -> set:
    "The last words of the decorators: `@torch.no_grad()` is no_grad."
    return {source_of(d.func if isinstance(d, ast.Call) else d).split(".")[-1] for d in node.decorator_list}


def function(node, module: str, notes: dict, owner: str = "") -> Entry:
    "The entry of a function or, with an owner, of a method."
    marks = decorators(node)
    skip_first = bool(owner) and "staticmethod" not in marks
    last = max([node.lineno, *(a.end_lineno for a in ast.walk(node.args) if hasattr(a, "end_lineno"))])
    closing = [notes[line] for line in range(last + 1, node.body[0].lineno) if line in notes]
    if not closing and node.lineno == node.body[0].lineno - 1 and not node.args.args:
        closing = [notes.get(node.lineno, "")]
    kind = "property" if marks & {"property", "cached_property"} else "method" if owner else "function"
    return Entry(kind, module, f"{owner}.{node.name}" if owner else node.name,
                 "" if kind == "property" else signature(node.args, skip_first), ast.get_docstring(node) or "",
                 rows_of_arguments(node.args, notes, skip_first), (source_of(node.returns), " ".join(closing)))


def class_(node, module: str, notes: dict) -> Entry:
    "The entry of a class: its fields or what its constructor takes, and its public methods."
    bases = [source_of(b).split(".")[-1] for b in node.bases]
    has_fields = "dataclass" in decorators(node) or {"NamedTuple", "TypedDict"} & set(bases)
    entry = Entry("class", module, node.name, doc=ast.get_docstring(node) or "")
    for item in node.body:
        if isinstance(item, ast.AnnAssign) and has_fields:
            entry.rows.append((item.target.id, source_of(item.value), source_of(item.annotation),
                               notes.get(item.end_lineno, notes.get(item.lineno, ""))))
        elif isinstance(item, ast.FunctionDef) and item.name == "__init__":
            made = function(item, module, notes, node.name)
            entry.signature, entry.rows = made.signature, made.rows
        elif isinstance(item, ast.FunctionDef) and not item.name.startswith("_"):
            method = function(item, module, notes, node.name)
            if method.doc or any(row[3] for row in method.rows):
                entry.members.append(method)
    return entry


@cache
def exported(source: str, module: str) -> list:
    "The entries of one `#| export` cell, in the order of the source; private names are left out."
    notes, entries = comments(source), []
    for node in ast.parse(source).body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            entries.append(function(node, module, notes))
        elif isinstance(node, ast.ClassDef):
            entries.append(class_(node, module, notes))
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names = [n.id for target in targets for n in ast.walk(target)
                     if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)]
            entries += [Entry("data", module, name) for name in names]
    return [entry for entry in entries if not entry.name.startswith("_")]


def lines_of(module_source: str) -> dict:
    "Name -> line in the generated module, for functions, classes and their methods."
    found = {}
    for node in ast.parse(module_source).body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            found[node.name] = node.lineno
            for item in getattr(node, "body", []):
                if isinstance(node, ast.ClassDef) and isinstance(item, ast.FunctionDef):
                    found[f"{node.name}.{item.name}"] = item.lineno
    return found


def markdown(text: str, cell: bool = False) -> str:
    "A comment (`cell`: for a table) or docstring as MyST: what would be markup by accident is escaped."
    pieces = re.split(r"(``.*?``|`[^`\n]*`|\$(?! )[^$\n]+(?<! )\$)", text)
    special = r"([<$\[\]*_{}~])" if cell else r"([<$\[\]{}~])" # outside of code and mathematics
    pieces[::2] = [re.sub(special, r"\\\1", piece) for piece in pieces[::2]]
    joined = "".join(pieces)
    return " ".join(joined.replace("|", r"\|").split()) if cell else joined


def code(text: str) -> str:
    "Source text as inline code in a table."
    return f"`{text}`".replace("|", r"\|").replace("\n", " ") if text else ""


def table(entry: Entry) -> str:
    "The parameters as a Markdown table; equal neighbours share a row, columns that are empty are left out."
    rows = []
    for name, default, kind, note in entry.rows:
        last = rows[-1] if rows else None
        if last and note and last[1:] == [note, kind, default]:
            last[0] += ", " + code(name)
        else:
            rows.append([code(name), note, kind, default])
    kind, note = entry.returns
    if note or (kind and kind != "None"):
        rows.append(["*returns*", note, kind, ""])
    cells = [[name, markdown(note, cell=True), code(kind), code(default)] for name, note, kind, default in rows]
    heads = ["fields" if entry.kind == "class" and not entry.signature else "parameter", "what it is", "type", "default"]
    keep = [i for i in range(4) if i == 0 or any(row[i] for row in cells)]
    lines = [[heads[i] for i in keep], ["---"] * len(keep), *([row[i] for i in keep] for row in cells)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def card(entry: Entry, unfold: bool = False, fence: int = 6) -> str:
    "The entry as MyST: a Python object that can be linked to and searched for."
    colons = ":" * fence
    lines = [f"{colons}{{py:{entry.kind}}} {entry.name}{entry.signature}", f":module: {entry.module}", "",
             markdown(entry.doc), ""]
    if any(note for *_, note in entry.rows) or entry.returns[1]:
        summary = "Fields" if entry.kind == "class" and not entry.signature else "Parameters"
        lines += [f"<details class=\"api\"{' open' * unfold}><summary>{summary}</summary>", "", table(entry), "", "</details>", ""]
    lines += [card(member, fence=fence - 1) for member in entry.members]
    return "\n".join([*lines, colons])
