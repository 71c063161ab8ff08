"""Measures of form for `test_house.py`: the syntax tree of a module, and what ruff reports."""

import ast
import json
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
MOST_EXPRESSIONS = 25  # per statement; names and constants do not count


def contains(node, kinds):
    "Check whether a node of these kinds is inside another node."
    return any(isinstance(inner, kinds) for inner in ast.walk(node) if inner is not node)


def expressions(node):
    "Return the number of expressions in a node, without names and constants."
    inner = [part for part in ast.walk(node) if isinstance(part, ast.expr)]
    return len([part for part in inner if not isinstance(part, (ast.Constant, ast.Name))])


def is_named_lambda(node):
    "Return whether a lambda is assigned to a name: `f = lambda x: x`."
    return isinstance(node, ast.Assign) and isinstance(node.value, ast.Lambda)


def is_tuple_assignment(node):
    "Return whether several values are assigned at once: `a, b = 1, 2`."
    if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Tuple):
        return False
    return isinstance(node.targets[0], ast.Tuple)


def is_list_times_condition(node):
    "Return whether a list is kept or emptied by a product: `[x] * bool(y)`."
    if not isinstance(node, ast.BinOp) or not isinstance(node.op, ast.Mult):
        return False
    sides = (node.left, node.right)
    has_list = any(isinstance(side, (ast.List, ast.Tuple)) for side in sides)
    return has_list and any(is_condition(side) for side in sides)


def is_condition(node):
    "Return whether an expression is true or false by its form."
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Name) and node.func.id == "bool"
    return isinstance(node, (ast.Compare, ast.BoolOp, ast.UnaryOp))


def is_walrus_in_comprehension(node):
    "Return whether a comprehension assigns: `[y for x in xs if (y := f(x))]`."
    return isinstance(node, ast.comprehension) and contains(node, ast.NamedExpr)


def is_nested_ternary(node):
    "Return whether a ternary is a direct part of another: `a if b else c if d else e`."
    if not isinstance(node, ast.IfExp):
        return False
    return any(isinstance(part, ast.IfExp) for part in (node.test, node.body, node.orelse))


def is_nested_comprehension(node):
    "Check whether a comprehension is inside another."
    return isinstance(node, COMPREHENSIONS) and contains(node, COMPREHENSIONS)


def is_full_statement(node):
    "Return whether one assignment, call or return holds more than `MOST_EXPRESSIONS`."
    simple = (ast.Assign, ast.AnnAssign, ast.AugAssign, ast.Expr, ast.Return)
    return isinstance(node, simple) and expressions(node) > MOST_EXPRESSIONS


PACKED = (
    is_named_lambda,
    is_tuple_assignment,
    is_list_times_condition,
    is_walrus_in_comprehension,
    is_nested_ternary,
    is_nested_comprehension,
    is_full_statement,
)


def packed(source):
    "Return the packed constructs of a module as (line, name of the construct)."
    result = []
    for node in ast.walk(ast.parse(source)):
        for test in PACKED:
            if test(node):
                line = getattr(node, "lineno", 0)  # the `for` of a comprehension has no line
                result.append((line, test.__name__.removeprefix("is_")))
    return result


def is_kernel(function):
    "Check whether a function is a kernel, which may be long because it stays one program."
    return any("jit" in ast.unparse(decorator) for decorator in function.decorator_list)


def long_functions(source, most, kernels=False):
    "Return (name, lines) of the functions or kernels with more than `most` lines."
    result = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, FUNCTIONS) and is_kernel(node) == kernels:
            lines = node.end_lineno - node.lineno + 1
            if lines > most:
                result.append((node.name, lines))
    return result


def without_public_names(source):
    "Return a module without its list of public names, which nbdev writes in wide lines."
    return re.sub(r"^__all__ = \[.*?\]$", "__all__ = []", source, flags=re.M | re.S)


def ruff(sources, rules, folder):
    "Return ruff's findings by these rules and the project's settings: [(module, rule, line)]."
    for name, source in sources.items():
        path = folder / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(without_public_names(source), encoding="utf-8")
    settings = Path(__file__).parents[1] / "pyproject.toml"
    command = [sys.executable, "-m", "ruff", "check", "--no-cache", "--exit-zero"]
    command += ["--config", str(settings), "--select", ",".join(rules)]
    command += ["--output-format", "json", "."]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
    return [
        (item["filename"], item["code"], item["location"]["row"])
        for item in json.loads(done.stdout)
    ]


def per_rule(findings):
    "Return the number of findings of each rule."
    return Counter(rule for _, rule, _ in findings)
