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

    kind: str  # "function", "class", "method", "property" or "data"
    module: str  # "longhorn_kit.scan.op"
    name: str  # "longhorn_scan", "SequenceLM.generate"
    signature: str = ""  # "(q, k, x, b, b_bias=None)"
    doc: str = ""  # docstring
    rows: list = field(
        default_factory=list
    )  # (name, default, type, comment) of parameters or fields
    returns: tuple = ("", "")  # (type, comment)
    members: list = field(default_factory=list)  # methods of a class

    @property
    def full_name(self):
        return f"{self.module}.{self.name}"


def comments(source: str) -> dict:
    "Line number -> text of its comment; a line that holds a comment alone continues the one above."
    found = {}
    alone = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            found[token.start[0]] = token.string.lstrip("# ").rstrip()
            if not token.line[: token.start[1]].strip():
                alone.add(token.start[0])
    for line in sorted(alone, reverse=True):
        if line - 1 in found:
            found[line - 1] += " " + found.pop(line)
        else:
            found.pop(line)
    return found


def source_of(node) -> str:
    return "" if node is None else ast.unparse(node)


ATOM = r'\((?:[^()]|\([^()]*\))*\)|\{[^}]*\}|\[[^\]]*\]|`[^`]*`|"[^"]*"'  # what is not split


def pieces(text: str) -> list:
    "Split a comment at its semicolons or, without any, at commas before a new part."
    flat = re.sub(ATOM, lambda match: "_" * len(match[0]), text)
    if "->" in flat and ";" not in flat:
        return [text]
    ends = [
        match.start() for match in re.finditer(";" if ";" in flat else ",(?! (?:and|or) )", flat)
    ]
    return [
        text[start:end].strip()
        for start, end in zip([0, *(end + 1 for end in ends)], [*ends, len(text)])
    ]


def share(text: str, types: dict) -> dict:
    """Give a line's comment to its parameters, name -> type: by "name: text" and "name (shape)"; in their order if it
    has as many parts as the line has parameters, or tensors, or parameters from the first tensor on; else to the only
    one that may be None, for "None: text", or is a tensor, for "(shape)"; else to all."""
    name = "|".join(map(re.escape, types))
    labels = list(
        re.finditer(rf"(?:^|(?<=[;,] ))((?:(?:{name}), )*(?:{name}))(?:: | (?=\())", text)
    )
    if labels:
        ends = [*(label.start() for label in labels[1:]), len(text)]
        found = {
            one: text[label.end() : end].rstrip("; ,")
            for label, end in zip(labels, ends)
            for one in label[1].split(", ")
        }
        rest = [one for one in types if one not in found]
        return found | dict.fromkeys(rest, text[: labels[0].start()].rstrip("; ,"))
    parts = pieces(text)
    tensors = [one for one, kind in types.items() if re.search("Tensor|array", kind)]
    later = list(types)[list(types).index(tensors[0]) :] if tensors else []
    for names in (list(types), *([tensors, later] if text.startswith("(") else [])):
        if len(parts) == len(names):
            return dict(zip(names, parts))
    meant = (
        [one for one, kind in types.items() if "None" in kind]
        if text.startswith("None:")
        else tensors
        if text.startswith("(")
        else []
    )
    return dict.fromkeys(meant if len(meant) == 1 else types, text)


def rows_of_arguments(arguments: ast.arguments, notes: dict, skip_first: bool, first: int) -> tuple:
    """Return one row per parameter, (name, default, type, comment), and what the comment of the line `first`, which has
    the whole signature, says of the result: what follows an arrow, or a shape if no parameter is a tensor."""
    plain = arguments.posonlyargs + arguments.args
    defaults = [None] * (len(plain) - len(arguments.defaults)) + arguments.defaults
    listed = [("", *pair) for pair in zip(plain, defaults)][skip_first:]
    listed += [("*", arguments.vararg, None)] if arguments.vararg else []
    listed += [("", *pair) for pair in zip(arguments.kwonlyargs, arguments.kw_defaults)]
    listed += [("**", arguments.kwarg, None)] if arguments.kwarg else []
    lines = {}
    result = ""
    for _, arg, default in listed:
        line = (default or arg).end_lineno
        lines.setdefault(line if line in notes else arg.lineno, {})[arg.arg] = source_of(
            arg.annotation
        )
    shared = {}
    for line, types in lines.items():
        text = notes.get(line, "")
        if line == first and re.match(r"\(|->|(?:from |of |an? |\w+ \()[^;]*->", text):
            shape = (
                text.startswith("(")
                and len(pieces(text)) == 1
                and not re.search("Tensor|array", str(types))
            )
            text, _, result = map(
                str.strip, ("-> " * (shape and "->" not in text) + text).partition("->")
            )
        shared |= share(text, types) if text else {}
    return [
        (stars + arg.arg, source_of(default), source_of(arg.annotation), shared.get(arg.arg, ""))
        for stars, arg, default in listed
    ], result


def signature(arguments: ast.arguments, skip_first: bool) -> str:
    "The parameters with their defaults and without their types, which the table has."
    bare = ast.parse(f"def f({ast.unparse(arguments)}): pass").body[0].args
    everything = [*bare.posonlyargs, *bare.args, *bare.kwonlyargs, bare.vararg, bare.kwarg]
    for arg in filter(None, everything):
        arg.annotation = None
    if skip_first:
        (bare.posonlyargs or bare.args).pop(0)
        bare.defaults = (
            bare.defaults[-len(bare.args + bare.posonlyargs) :]
            if bare.args + bare.posonlyargs
            else []
        )
    return f"({ast.unparse(bare)})"


def decorators(node) -> set:
    "The last words of the decorators: `@torch.no_grad()` is no_grad."
    return {
        source_of(d.func if isinstance(d, ast.Call) else d).split(".")[-1]
        for d in node.decorator_list
    }


def function(node, module: str, notes: dict, owner: str = "") -> Entry:
    "The entry of a function or, with an owner, of a method."
    marks = decorators(node)
    skip_first = bool(owner) and "staticmethod" not in marks
    last = max(
        [node.lineno, *(a.end_lineno for a in ast.walk(node.args) if hasattr(a, "end_lineno"))]
    )
    rows, result = rows_of_arguments(node.args, notes, skip_first, node.lineno)
    closing = (
        [result]
        if result
        else [notes[line] for line in range(last + 1, node.body[0].lineno) if line in notes]
    )
    if not closing and node.lineno == node.body[0].lineno - 1 and not node.args.args:
        closing = [notes.get(node.lineno, "")]
    kind = (
        "property" if marks & {"property", "cached_property"} else "method" if owner else "function"
    )
    return Entry(
        kind,
        module,
        f"{owner}.{node.name}" if owner else node.name,
        "" if kind == "property" else signature(node.args, skip_first),
        ast.get_docstring(node) or "",
        rows,
        (source_of(node.returns), " ".join(closing)),
    )


def class_(node, module: str, notes: dict) -> Entry:
    "The entry of a class: its fields or what its constructor takes, and its public methods."
    bases = [source_of(b).split(".")[-1] for b in node.bases]
    has_fields = "dataclass" in decorators(node) or {"NamedTuple", "TypedDict"} & set(bases)
    entry = Entry("class", module, node.name, doc=ast.get_docstring(node) or "")
    for item in node.body:
        if isinstance(item, ast.AnnAssign) and has_fields:
            entry.rows.append(
                (
                    item.target.id,
                    source_of(item.value),
                    source_of(item.annotation),
                    notes.get(item.end_lineno, notes.get(item.lineno, "")),
                )
            )
        elif isinstance(item, ast.FunctionDef) and item.name == "__init__":
            made = function(item, module, notes, node.name)
            entry.signature = made.signature
            entry.rows = made.rows
        elif isinstance(item, ast.FunctionDef) and not item.name.startswith("_"):
            method = function(item, module, notes, node.name)
            if method.doc or any(row[3] for row in method.rows):
                entry.members.append(method)
    return entry


@cache
def exported(source: str, module: str) -> list:
    "The entries of one `#| export` cell, in the order of the source; private names are left out."
    notes = comments(source)
    entries = []
    for node in ast.parse(source).body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            entries.append(function(node, module, notes))
        elif isinstance(node, ast.ClassDef):
            entries.append(class_(node, module, notes))
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names = [
                n.id
                for target in targets
                for n in ast.walk(target)
                if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)
            ]
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
    special = r"([<$\[\]*_{}~])" if cell else r"([<$\[\]{}~])"  # outside of code and mathematics
    pieces[::2] = [re.sub(special, r"\\\1", piece) for piece in pieces[::2]]
    joined = "".join(pieces)
    return " ".join(joined.replace("|", r"\|").split()) if cell else joined


def code(text: str) -> str:
    "Source text as inline code in a table."
    return f"`{text}`".replace("|", r"\|").replace("\n", " ") if text else ""


def table(entry: Entry) -> str:
    "The parameters as a Markdown table; neighbours with one comment share a row, columns that are empty are left out."
    rows = []
    for name, default, kind, note in entry.rows:
        last = rows[-1] if rows else None
        if last and note and last[1] == note:
            last[0] += ", " + code(name)
            last[2:] = [seen | {code(text): 0} for seen, text in zip(last[2:], (kind, default))]
        else:
            rows.append([code(name), note, {code(kind): 0}, {code(default): 0}])
    kind, note = entry.returns
    if note or (kind and kind != "None"):
        rows.append(["*returns*", note, {code(kind): 0}, {}])
    cells = [
        [name, markdown(note, cell=True), *(", ".join(filter(None, seen)) for seen in others)]
        for name, note, *others in rows
    ]
    heads = [
        "fields" if entry.kind == "class" and not entry.signature else "parameter",
        "what it is",
        "type",
        "default",
    ]
    keep = [i for i in range(4) if i == 0 or any(row[i] for row in cells)]
    lines = [
        [heads[i] for i in keep],
        ["---"] * len(keep),
        *([row[i] for i in keep] for row in cells),
    ]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def card(entry: Entry, unfold: bool = False, fence: int = 6) -> str:
    "The entry as MyST: a Python object that can be linked to and searched for."
    colons = ":" * fence
    lines = [
        f"{colons}{{py:{entry.kind}}} {entry.name}{entry.signature}",
        f":module: {entry.module}",
        "",
        markdown(entry.doc),
        "",
    ]
    if any(note for *_, note in entry.rows) or entry.returns[1]:
        summary = "Fields" if entry.kind == "class" and not entry.signature else "Parameters"
        lines += [
            f'<details class="api"{" open" * unfold}><summary>{summary}</summary>',
            "",
            table(entry),
            "",
            "</details>",
            "",
        ]
    lines += [card(member, fence=fence - 1) for member in entry.members]
    return "\n".join([*lines, colons])
