"""The base classes of all passes over a script, and helpers for its names, imports and calls."""

import ast
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import libcst as cst
import libcst.matchers as m
from libcst import Arg, BaseExpression, Call, CSTNode
from libcst.metadata import (
    MetadataWrapper,
    PositionProvider,
    QualifiedNameProvider,
    QualifiedNameSource,
)

HVTRAIN = "hvtrain.keras"


@dataclass(frozen=True)
class Imported:
    """One name of an import statement.

    Attributes:
        name: The full name, such as tensorflow.keras.layers.Dense.
        alias: The name by which the script uses it; empty after `import a.b`, which binds `a`.
    """

    name: str
    alias: str

    @property
    def bound(self) -> str:
        """The first part of the name in the script, which the statement binds."""
        return self.alias or self.name.partition(".")[0]


def imports(statement: cst.Import | cst.ImportFrom) -> list[Imported]:
    """Returns the names that an import statement imports."""
    if isinstance(statement, cst.Import):
        return [
            Imported(item.evaluated_name, item.evaluated_alias or "") for item in statement.names
        ]

    module = f"{'.' * len(statement.relative)}{dotted(statement.module)}"
    if isinstance(statement.names, cst.ImportStar):
        return [Imported(f"{module}.*", "*")]
    return [
        Imported(f"{module}.{item.evaluated_name}", item.evaluated_alias or item.evaluated_name)
        for item in statement.names
    ]


def imports_in(module: cst.Module) -> Iterator[tuple[CSTNode, Imported]]:
    """Yields each imported name of a script with its statement, in order."""
    for statement in m.findall(module, m.Import() | m.ImportFrom()):
        for item in imports(statement):
            yield statement, item


class Names(cst.MetadataDependent):
    """Base of each pass over a script: resolves names in the script to the full names that were imported."""

    METADATA_DEPENDENCIES = (QualifiedNameProvider, PositionProvider)

    def visit_Module(self, node: cst.Module) -> None:
        self._imports = [(self.line_of(statement), item) for statement, item in imports_in(node)]
        self._bases = _bases_without("__init__", node)
        # What each name stands for: the call that made an object, the call or name that a function
        # returns, the base of a class.
        self._origins = _bases_without("compile", node)
        for assign in m.findall(node, m.Assign(value=m.Call())):
            self._origins[code_of(assign.targets[0].target)] = assign.value
        for function in m.findall(node, m.FunctionDef()):
            results = [part.value for part in m.findall(function, m.Return(m.Call() | m.Name()))]
            if len({code_of(result).partition("(")[0] for result in results}) == 1:
                self._origins.setdefault(function.name.value, results[0])

    def line_of(self, node: CSTNode) -> int:
        return self.get_metadata(PositionProvider, node).start.line

    def imported(self, node: CSTNode) -> str:
        """Returns the full name behind a dotted name; empty if it does not come from an import.

        `tf.keras.Input` is tensorflow.keras.Input after `import tensorflow as tf`.
        """
        base, dot, rest = dotted(node).partition(".")
        if not base:
            return ""

        qualified = self.get_metadata(QualifiedNameProvider, node, frozenset())
        names = {name.name for name in qualified if name.source == QualifiedNameSource.IMPORT}
        if len(names) < 2:
            return next(iter(names), "")

        # If a name is imported twice, as hvd often is, the last import before its use counts.
        last = min(names)
        for line, item in self._imports:
            name = f"{item.name if item.alias else item.bound}{dot}{rest}"
            if item.bound == base and name in names and line <= self.line_of(node):
                last = name
        return last

    def called(self, call: Call) -> str:
        """Returns the full name of the called function or class; empty if it does not come from an import.

        For a class of the script without an __init__ of its own, this is the base class.
        """
        return self.imported(_resolve(call, self._bases))

    def compiling_class(self, model: BaseExpression) -> BaseExpression:
        """Returns the class whose compile a model uses; another expression if the script does not show it."""
        return _resolve(model, self._origins)


class Pass(Names, cst.CSTTransformer):
    """A pass that changes a script."""


def parse(text: str) -> MetadataWrapper:
    """Parses a script for one or more passes."""
    # Nothing else holds this tree, so it need not be copied.
    return MetadataWrapper(cst.parse_module(text), unsafe_skip_copy=True)


def apply(text: str, transformer: Pass) -> str:
    """Runs a pass over a script, and returns the new text."""
    return parse(text).visit(transformer).code


def dotted(node: CSTNode | None) -> str:
    """Returns a dotted name such as `a.b.c` as written; empty for anything but names and dots."""
    if isinstance(node, cst.Name):
        return node.value
    if isinstance(node, cst.Attribute):
        before = dotted(node.value)
        if before:
            return f"{before}.{node.attr.value}"
    return ""


def method_of(call: Call) -> str:
    """Returns the name after the last dot of the called function; empty if there is no dot."""
    return call.func.attr.value if isinstance(call.func, cst.Attribute) else ""


def _bases_without(method: str, module: cst.Module) -> dict[str, BaseExpression]:
    """Returns the base of each class in the script that does not define the method itself."""
    return {
        class_def.name.value: class_def.bases[0].value
        for class_def in m.findall(module, m.ClassDef(bases=[m.AtLeastN(n=1)]))
        if not m.findall(class_def, m.FunctionDef(m.Name(method)))
    }


def _resolve(node: BaseExpression, table: dict[str, BaseExpression]) -> BaseExpression:
    """Follows a name through the table's entries, and returns the last one; `A(x)` counts as `A`."""
    name = node.func if isinstance(node, Call) else node
    # Each entry is followed only once, so a cycle ends.
    others = dict(table)
    following = others.pop(code_of(name), None)
    return _resolve(following, others) if following else name


def is_model_name(node: CSTNode) -> bool:
    """True for a name that scripts typically give to models, such as model or self.unet."""
    return dotted(node).lower().endswith(("model", "net", "network"))


def is_number(node: CSTNode) -> bool:
    """True for a literal number: 3, 1e-1, -2."""
    digits = m.Integer() | m.Float()
    return m.matches(node, digits | m.UnaryOperation(m.Minus() | m.Plus(), digits))


def code_of(node: CSTNode) -> str:
    return cst.Module([]).code_for_node(node)


def names_used(text: str) -> Counter[str]:
    """Counts how often each name is used in the script.

    Import statements and names after a dot do not count.
    """
    return Counter(node.id for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Name))


def argument(call: Call, keyword: str, position: int | None = None) -> Arg | None:
    """Returns the argument with this keyword or at this position; None if there is none, or * or ** comes before."""
    for number, arg in enumerate(call.args):
        if arg.star:
            return None
        has_position = arg.keyword is None and number == position
        if has_position or (arg.keyword and arg.keyword.value == keyword):
            return arg

    return None


def with_args(call: Call, args: Sequence[Arg]) -> Call:
    """Returns the call with these arguments, laid out as before."""
    if not args or not call.args:
        return call.with_changes(args=list(args))

    # In libcst a comma includes the line break after it. The last argument may have no comma, or
    # one that puts the closing bracket on a line of its own.
    between = call.args[0].comma if len(call.args) > 1 else cst.MaybeSentinel.DEFAULT
    end = call.args[-1].comma

    new_args = []
    for arg in args[:-1]:
        if not isinstance(arg.comma, cst.Comma) or arg.comma is end:
            arg = arg.with_changes(comma=between)
        new_args.append(arg)

    return call.with_changes(args=[*new_args, args[-1].with_changes(comma=end)])


def keyword(name: str, value: cst.BaseExpression) -> Arg:
    """Makes the argument name=value, without spaces around the equals sign."""
    tight = cst.AssignEqual(cst.SimpleWhitespace(""), cst.SimpleWhitespace(""))
    return Arg(value, keyword=cst.Name(name), equal=tight)
