"""Change a solution of an exercise in many small ways; its check must reject the wrong versions.

`mutants` changes one place of a source per mutant: an operator, a sign, a name, a constant, an
index, a keyword or a line. The only rule about kernels is that names ending in `_ptr` are pointers,
so it also works for plain functions. `impostors` wraps a right answer in answers that are right
only once, or almost right.
"""

import ast
import copy
from collections.abc import Callable, Iterator

ARITHMETIC = {
    ast.Add: (ast.Sub, ast.Mult),
    ast.Sub: (ast.Add, ast.Mult),
    ast.Mult: (ast.Add, ast.Div),
    ast.Div: (ast.Mult, ast.Sub),
    ast.FloorDiv: (ast.Mult, ast.Mod),
    ast.Mod: (ast.FloorDiv, ast.Mult),
    ast.Pow: (ast.Mult, ast.Add),
    ast.MatMult: (ast.Mult,),
    ast.BitAnd: (ast.BitOr,),
    ast.BitOr: (ast.BitAnd,),
}
COMPARISONS = {
    ast.Lt: (ast.LtE, ast.Gt, ast.Eq),
    ast.LtE: (ast.Lt, ast.Gt, ast.Eq),
    ast.Gt: (ast.GtE, ast.Lt, ast.Eq),
    ast.GtE: (ast.Gt, ast.Lt, ast.Eq),
    ast.Eq: (ast.NotEq, ast.Lt),
    ast.NotEq: (ast.Eq,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
}
NOT_VALUES = ("func", "annotation", "returns", "decorator_list")  # fields without a value


def is_pointer(name):
    return name.endswith("_ptr")


def is_value(node, parent, field):
    "Check for an expression whose value can be replaced: a call, a name, a sum, ..."
    if field in (*NOT_VALUES, "slice") or isinstance(parent, ast.Attribute):
        return False
    if isinstance(node, ast.Name):
        return isinstance(node.ctx, ast.Load) and not is_pointer(node.id)
    return isinstance(node, (ast.Call, ast.BinOp, ast.Subscript)) and not isinstance(
        getattr(node, "ctx", None), ast.Store
    )


def other_names(node, field, names):
    "Yield at most three names of the same scope that can replace a name."
    loaded = isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)
    if not loaded or node.id not in names or field in NOT_VALUES:
        return
    of_kind = is_pointer(node.id)
    others = [name for name in names if is_pointer(name) == of_kind and name != node.id]
    number = names.index(node.id)
    turn = number % max(1, len(others))
    turned = others[turn:] + others[:turn]
    for name in turned[:3]:
        yield "other name", ast.Name(name, ast.Load())


def other_operators(node):
    "Yield other operators and comparisons."
    for kind, table in (("operator", ARITHMETIC), ("comparison", COMPARISONS)):
        for new in table.get(type(node), ()):
            yield kind, new()
    if isinstance(node, (ast.And, ast.Or)):
        yield "operator", ast.Or() if isinstance(node, ast.And) else ast.And()


def other_values(node, parent, field):
    "Yield changed values: negated, constant, off by one, without a sign."
    places = (
        ast.BinOp,
        ast.Assign,
        ast.AugAssign,
        ast.Call,
        ast.Subscript,
        ast.Return,
        ast.keyword,
    )
    if is_value(node, parent, field) and isinstance(parent, places):
        if field != "value" or not isinstance(parent, ast.Subscript):
            yield "sign", ast.UnaryOp(ast.USub(), node)
            for constant in (0.0, 1.0):
                yield "constant", ast.Constant(constant)
        for operator in (ast.Add(), ast.Sub()):
            yield "off by one", ast.BinOp(node, operator, ast.Constant(1))
    if isinstance(node, ast.UnaryOp):
        yield "sign", node.operand
    if isinstance(node, ast.Constant) and not isinstance(parent, ast.Subscript):
        if type(node.value) in (int, float):
            for step in (1, -1):
                yield "off by one", ast.Constant(node.value + step)
        if isinstance(node.value, bool):
            yield "constant", ast.Constant(not node.value)


def other_order(node, field):
    "Yield swapped operands, arguments and axes, and single sides of an operation."
    if isinstance(node, ast.Tuple) and len(node.elts) == 2 and isinstance(node.ctx, ast.Load):
        kind = "axis" if field == "slice" else "swapped"
        yield kind, ast.Tuple(node.elts[::-1], ast.Load())
    if isinstance(node, ast.BinOp):
        for side in (node.left, node.right):
            if not (isinstance(side, ast.Name) and is_pointer(side.id)):
                yield "one side", side
        ordered = (ast.Sub, ast.Div, ast.FloorDiv, ast.Mod, ast.Pow, ast.MatMult)
        if isinstance(node.op, ordered):
            yield "swapped", ast.BinOp(node.right, node.op, node.left)
    if isinstance(node, ast.Call):
        for i in range(len(node.args) - 1):
            swapped = copy.copy(node)
            first, second = node.args[i : i + 2]
            before = node.args[:i]
            after = node.args[i + 2 :]
            swapped.args = [*before, second, first, *after]
            yield "swapped", swapped


def without_parts(node, parent, field):
    "Yield calls without keywords or inner calls, and bodies without a line."
    if isinstance(node, ast.Call):
        names = [keyword.arg for keyword in node.keywords]
        single = [[name] for name in names if name]
        pairs = [["mask", "other"]] if "mask" in names else []
        for drop in single + pairs:
            fewer = copy.copy(node)
            fewer.keywords = [keyword for keyword in node.keywords if keyword.arg not in drop]
            yield "keyword", fewer
        if node.args and field not in NOT_VALUES and isinstance(node.func, ast.Attribute):
            yield "argument alone", node.args[0]
    if isinstance(node, ast.Return) and node.value is not None:
        yield "no result", ast.Return(None)
    statements = (ast.Assign, ast.AugAssign, ast.Expr, ast.For, ast.If, ast.While)
    if isinstance(node, statements) and field in ("body", "orelse"):
        yield "dropped line", ast.Pass()


def replacements(node, parent, field, names):
    "Yield (kind, new node) for one node; `names` are those of the function around it."
    yield from other_names(node, field, names)
    yield from other_operators(node)
    yield from other_values(node, parent, field)
    yield from other_order(node, field)
    yield from without_parts(node, parent, field)


def scopes(tree):
    "Return (first line, last line, names) of every function."
    functions = []
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef):
            names = {node.arg for node in ast.walk(function) if isinstance(node, ast.arg)}
            for node in ast.walk(function):
                if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                    names.add(node.id)
            functions.append((function.lineno, function.end_lineno, sorted(names)))
    return functions


def mutants(
    source: str, keep: Callable[[], bool] = lambda: True
) -> Iterator[tuple[str, str]]:  # kind of change, source
    "Yield the mutants that `keep` chooses, without duplicates, formatted by `ast.unparse`."
    tree = ast.parse(source)
    texts = {ast.unparse(tree)}
    functions = scopes(tree)
    for parent in list(ast.walk(tree)):
        line = getattr(parent, "lineno", 0)
        around = [names for first, last, names in functions if first <= line <= last]
        names = around[-1] if around else []
        for field, content in ast.iter_fields(parent):
            nodes = content if isinstance(content, list) else [content]
            for i, node in enumerate(list(nodes)):
                if not isinstance(node, ast.AST):
                    continue
                for kind, new in list(replacements(node, parent, field, names)):
                    if not keep():
                        continue
                    text = with_replacement(tree, parent, field, i, new)
                    if text not in texts:
                        texts.add(text)
                        yield kind, text


def with_replacement(tree, parent, field, i, new):
    "Return the source of a tree in which a new node temporarily replaces another."
    content = getattr(parent, field)
    if isinstance(content, list):
        changed = [*content[:i], new, *content[i + 1 :]]
        setattr(parent, field, changed)
    else:
        setattr(parent, field, new)
    text = ast.unparse(tree)
    setattr(parent, field, content)
    return text


def impostors(answer: Callable, outputs: int = 1) -> Iterator[tuple[str, Callable]]:
    """Yield answers that are right only once, or almost right.

    An answer fills the last `outputs` of its arguments."""

    def remember(by_shape):
        kept = {}

        def cached(*arrays):
            answer(*arrays)
            last = arrays[-outputs:]
            for number, out in enumerate(last):
                key = (number, *(tuple(array.shape) for array in arrays)) if by_shape else number
                first = kept.setdefault(key, out.clone())
                if first.shape == out.shape:
                    out.copy_(first)

        return cached

    def afterwards(change):
        def changed(*arrays):
            answer(*arrays)
            change(arrays[-1])

        return changed

    yield "first answer for ever", remember(by_shape=False)
    yield "first answer per shape", remember(by_shape=True)
    yield "a constant", afterwards(lambda out: out.fill_(0.5))
    yield "zeros", afterwards(lambda out: out.zero_())
    yield "no kernel", lambda *arrays: arrays[-1].fill_(0.5)
    yield "last element off", afterwards(lambda out: out.view(-1)[-1:].mul_(1.001))
    yield "an input changed", lambda *arrays: (answer(*arrays), arrays[0].add_(1.0))
