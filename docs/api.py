"""Read the exported names of a notebook, and the comments beside their parameters, from its source.

Sphinx's autodoc provides signatures, types and docstrings, but it ignores comments.
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
    doc: str = ""  # docstring
    comments: dict = field(default_factory=dict)  # parameter or field -> comment
    returns: str = ""  # comment of the result
    members: list = field(default_factory=list)  # methods of a class

    @property
    def full_name(self):
        return f"{self.module}.{self.name}"


NAMED = re.compile(r"\**\w+\s*[:=,]")  # the start of a line with a parameter or a field


def comments(source: str) -> dict:
    """Return line number -> text of the comment.

    A line with only a comment belongs to the parameter or field below, if that line has no other
    comment. Otherwise it continues the comment above."""
    found = {}
    alone = {}
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            is_alone = not token.line[: token.start[1]].strip()
            (alone if is_alone else found)[token.start[0]] = token.string.lstrip("# ").rstrip()
    lines = ["", *source.splitlines(), ""]
    while alone:
        first = last = min(alone)
        texts = [alone.pop(first)]
        while last + 1 in alone:
            last += 1
            texts.append(alone.pop(last))
        text = " ".join(texts)
        if NAMED.match(lines[last + 1].strip()) and last + 1 not in found:
            found[last + 1] = text
        elif first - 1 in found:
            found[first - 1] += " " + text
    return found


def source_of(node) -> str:
    return "" if node is None else ast.unparse(node)


ATOM = r'\((?:[^()]|\([^()]*\))*\)|\{[^}]*\}|\[[^\]]*\]|`[^`]*`|"[^"]*"'  # not split


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
    """Assign a line's comment to the line's parameters, name -> type.

    Parts such as "name: text" and "name (shape)" name their parameter. Otherwise parts are assigned
    in order, if there are as many parts as parameters, as tensors, or as parameters from the first
    tensor on. Otherwise "None: text" is assigned to the only parameter that may be None, and
    "(shape)" to the only tensor. Otherwise all parameters share the comment."""
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


def share_backwards(text: str, types: dict, own: int) -> dict:
    """Assign a comment to the last `own` parameters.

    A list of shapes is assigned to as many of the last parameters as it has shapes. A formatter
    splits a line of parameters and leaves the comment beside the last of them."""
    names = list(types)
    parts = pieces(text)
    if own < len(parts) <= len(names) and all(part.startswith("(") for part in parts):
        return dict(zip(names[len(names) - len(parts) :], parts))
    return share(text, {name: types[name] for name in names[len(names) - own :]})


def comments_of_arguments(
    arguments: ast.arguments, notes: dict, skip_first: bool, first: int, closing: str
) -> tuple:
    """Return the comment of each parameter, and that of the result.

    If the line `first` contains the complete signature, the comment of the result is the text after
    an arrow, or a shape if no parameter is a tensor. If the signature is wrapped and only its last
    line has a comment, `closing`, this comment is also that of the complete signature."""
    plain = arguments.posonlyargs + arguments.args
    defaults = [None] * (len(plain) - len(arguments.defaults)) + arguments.defaults
    listed = list(zip(plain, defaults))[skip_first:]
    listed += [(arguments.vararg, None)] if arguments.vararg else []
    listed += list(zip(arguments.kwonlyargs, arguments.kw_defaults))
    listed += [(arguments.kwarg, None)] if arguments.kwarg else []
    lines = {}
    result = ""
    for arg, default in listed:
        line = (default or arg).end_lineno
        lines.setdefault(line if line in notes else arg.lineno, {})[arg.arg] = source_of(
            arg.annotation
        )
    if closing and lines and not lines.keys() & notes.keys():
        lines = {first: {name: kind for types in lines.values() for name, kind in types.items()}}
        notes = {first: closing}
        closing = ""
    shared = {}
    bare = {}  # parameters of previous lines without a comment
    for line, types in lines.items():
        text = notes.get(line, "")
        bare |= types
        if line == first and re.match(r"\(|->|(?:from |of |an? |\w+ \()[^;]*->", text):
            shape = (
                text.startswith("(")
                and len(pieces(text)) == 1
                and not re.search("Tensor|array", str(types))
            )
            text, _, result = map(
                str.strip, ("-> " * (shape and "->" not in text) + text).partition("->")
            )
        if text:
            shared |= share_backwards(text, bare, len(types))
            bare = {}
    return {arg.arg: shared.get(arg.arg, "") for arg, _ in listed}, result or closing


def decorators(node) -> set:
    "Return the last word of every decorator: no_grad for `@torch.no_grad()`."
    return {
        source_of(d.func if isinstance(d, ast.Call) else d).split(".")[-1]
        for d in node.decorator_list
    }


def function(node, module: str, notes: dict, owner: str = "") -> Entry:
    "Return the entry of a function or, with an owner, of a method."
    marks = decorators(node)
    skip_first = bool(owner) and "staticmethod" not in marks
    last = max(
        [node.lineno, *(a.end_lineno for a in ast.walk(node.args) if hasattr(a, "end_lineno"))]
    )
    body = node.body[0].lineno
    closing = " ".join(notes[line] for line in range(last + 1, body) if line in notes)
    if not closing and node.lineno == body - 1 and not node.args.args:
        closing = notes.get(node.lineno, "")
    comments, returns = comments_of_arguments(node.args, notes, skip_first, node.lineno, closing)
    kind = (
        "property" if marks & {"property", "cached_property"} else "method" if owner else "function"
    )
    name = f"{owner}.{node.name}" if owner else node.name
    return Entry(kind, module, name, ast.get_docstring(node) or "", comments, returns)


def class_(node, module: str, notes: dict) -> Entry:
    "Return the entry of a class: fields or constructor's parameters, and public methods."
    bases = [source_of(b).split(".")[-1] for b in node.bases]
    has_fields = "dataclass" in decorators(node) or {"NamedTuple", "TypedDict"} & set(bases)
    entry = Entry("class", module, node.name, doc=ast.get_docstring(node) or "")
    for item in node.body:
        if isinstance(item, ast.AnnAssign) and has_fields:
            entry.comments[item.target.id] = notes.get(item.end_lineno, notes.get(item.lineno, ""))
        elif isinstance(item, ast.FunctionDef) and item.name == "__init__":
            entry.comments = function(item, module, notes, node.name).comments
        elif isinstance(item, ast.FunctionDef) and not item.name.startswith("_"):
            method = function(item, module, notes, node.name)
            if method.doc or any(method.comments.values()):
                entry.members.append(method)
    return entry


@cache
def exported(source: str, module: str) -> list:
    "Return the entries of one `#| export` cell in source order, without private names."
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


def restructured(text: str) -> str:
    "Convert a comment or docstring to reStructuredText, with markup only for code and mathematics."
    pieces = re.split(r"(``.*?``|`[^`\n]*`|\$(?! )[^$\n]+(?<! )\$)", text)
    for i, piece in enumerate(pieces):
        if piece.startswith("$"):
            pieces[i] = f":math:`{piece[1:-1]}`"
        elif piece.startswith("`"):
            pieces[i] = f"``{piece.strip('`')}``"
        else:
            pieces[i] = re.sub(r"([\\*_|<>`])", r"\\\1", piece.replace("...", "…"))
    return "".join(pieces)


def directive(full_name: str, kind: str) -> str:
    "Return the lines by which autodoc describes a name."
    options = {"class": "\n   :members:\n   :undoc-members:", "data": "\n   :no-value:"}
    return f".. auto{kind}:: {full_name}{options.get(kind, '')}\n"


def table(names: list) -> str:
    "Return the lines by which autosummary lists names with their first sentences."
    return "\n   ".join([".. autosummary::", ":nosignatures:", "", *(f"~{name}" for name in names)])


def myst(*directives: str) -> str:
    "Return directives of reStructuredText for a page in MyST."
    return "\n".join(["```{rst}", *directives, "```"])
