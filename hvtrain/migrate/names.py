"""The pass that renames imports and imported names for Keras 3."""

import ast
from collections import defaultdict
from collections.abc import Iterator

import libcst as cst

from hvtrain.migrate.parsing import HVTRAIN, Pass, apply, code_of, dotted, expression, names_used
from hvtrain.migrate.renamed import new_name

# How to write a name that no import of the script provides, and the import that this needs.
_WRITTEN = {"tensorflow": ("tf", "import tensorflow as tf"), "keras": ("keras", "import keras")}


def rename(text: str, keeps_horovod: bool) -> str:
    """The script with new names; with keeps_horovod the low-level horovod.tensorflow stays, as graph mode needs it."""
    names = _Names(keeps_horovod)
    new = apply(text, names)
    for line in sorted(names.missing, reverse=True):
        new = _with_import(new, line)
    return _without_imports(new, set(names_used(text)) - set(names_used(new)))


class _Names(Pass):
    def __init__(self, keeps_horovod: bool) -> None:
        super().__init__()
        self.keeps_horovod = keeps_horovod
        self.missing: set[str] = set()

    def visit_Attribute(self, node: cst.Attribute) -> bool:
        return not dotted(node)  # A chain of names is one name.

    def leave_Attribute(self, original_node: cst.Attribute, updated_node: cst.Attribute) -> cst.BaseExpression:
        return self._renamed(original_node) or updated_node

    def leave_Name(self, original_node: cst.Name, updated_node: cst.Name) -> cst.BaseExpression:
        """Renames a class or function that was imported under its own name."""
        name = self.imported(original_node)
        if not name or name == original_node.value or name.rpartition(".")[2] != original_node.value:
            return updated_node
        new = self._new(name)
        return expression(new if new.startswith('"') else new.rpartition(".")[2])

    def visit_Import(self, node: cst.Import) -> bool:
        return False

    def visit_ImportFrom(self, node: cst.ImportFrom) -> bool:
        return False

    def leave_SimpleStatementLine(
        self, original_node: cst.SimpleStatementLine, updated_node: cst.SimpleStatementLine
    ) -> cst.SimpleStatementLine | cst.FlattenSentinel:
        if len(original_node.body) > 1 or not isinstance(original_node.body[0], cst.Import | cst.ImportFrom):
            return updated_node
        statement = original_node.body[0]
        found = list(_imports(statement))
        new = [self._new(name) for name, *_ in found]
        if all(name == other for (name, *_), other in zip(found, new)):
            return updated_node
        lines = list(_lines(found, new, isinstance(statement, cst.Import)))
        made = [cst.parse_statement(line) for line in lines]
        if len(lines) == 1 and isinstance(statement, cst.ImportFrom) and "(" in code_of(statement):
            made = [updated_node.with_changes(body=[_same_layout(statement, made[0])])]
        else:
            made[-1] = made[-1].with_changes(trailing_whitespace=original_node.trailing_whitespace)
        made[0] = made[0].with_changes(leading_lines=original_node.leading_lines)
        return cst.FlattenSentinel(made)

    def _new(self, name: str) -> str:
        is_low = name.startswith("horovod.tensorflow") and not name.startswith("horovod.tensorflow.keras")
        return name if is_low and self.keeps_horovod else new_name(name)

    def _renamed(self, node: cst.Attribute) -> cst.BaseExpression | None:
        """The chain under its new name; None if renaming its import is enough."""
        name = self.imported(node)
        base: cst.BaseExpression = node
        while isinstance(base, cst.Attribute):
            base = base.value
        imported = self.imported(base)
        if not name or not imported:
            return None
        new = self._new(name)
        # `import a.b` binds a, which is not renamed; any other import binds what it is renamed to.
        bound = imported if dotted(base) == imported else self._new(imported)
        if new == bound + name[len(imported) :]:
            return None
        module = new.partition(".")[0]
        if module in _WRITTEN:
            written, line = _WRITTEN[module]
            self.missing.add(line)
            return expression(written + new[len(module) :])
        return expression(new)


def _imports(statement: cst.Import | cst.ImportFrom) -> Iterator[tuple[str, str, str]]:
    """For each imported name: full name, name in the script ("" for the full name's first part), and module."""
    module = (
        f"{'.' * len(statement.relative)}{dotted(statement.module)}" if isinstance(statement, cst.ImportFrom) else ""
    )
    if isinstance(statement.names, cst.ImportStar):
        yield f"{module}.*", "*", module
        return
    for alias in statement.names:
        given = dotted(alias.asname.name) if alias.asname else ""
        name = dotted(alias.name)
        yield (f"{module}.{name}", given or name, module) if module else (name, given, "")


def _lines(found: list[tuple[str, str, str]], new: list[str], is_plain: bool) -> Iterator[str]:
    """Import lines that bind the same names from their new places."""
    groups: dict[str, list[str]] = defaultdict(list)
    for (old, given, _), name in zip(found, new):
        if is_plain and not given:
            groups[""].append(name)
            continue
        module, _, last = name.rpartition(".")
        if name == HVTRAIN:
            module, last = "", HVTRAIN
        own = given in ("*", last) or (not is_plain and given == old.rpartition(".")[2] and name != HVTRAIN and module)
        groups[module].append(last if own else f"{last} as {given}")
    for module, names in groups.items():
        if module:
            yield f"from {module} import {', '.join(names)}"
        else:
            yield from (f"import {name}" for name in names)


def _same_layout(old: cst.ImportFrom, line: cst.BaseStatement) -> cst.ImportFrom:
    """The old statement with its brackets and comments, but with the new module and names."""
    new = line.body[0]
    names = [alias.with_changes(name=other.name, asname=other.asname) for alias, other in zip(old.names, new.names)]
    return old.with_changes(module=new.module, names=names)


def _with_import(text: str, line: str) -> str:
    """The script with this import above related ones, unless it has it already."""
    tree = ast.parse(text)
    imports = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    if any(ast.unparse(node) == line for node in imports):
        return text
    kin = ("tensorflow", "keras", "horovod", "hvtrain")
    modules = [getattr(node, "module", None) or node.names[0].name for node in imports]
    later = [node for node, module in zip(imports, modules) if module.partition(".")[0] in kin] or imports[-1:]
    lines = text.splitlines(keepends=True)
    lines.insert(later[0].lineno - 1 if later else 0, line + ("\r\n" if "\r\n" in text else "\n"))
    return "".join(lines)


def _without_imports(text: str, unused: set[str]) -> str:
    """The script without imports of these names."""
    return apply(text, _Unimport(unused)) if unused else text


class _Unimport(Pass):
    def __init__(self, unused: set[str]) -> None:
        super().__init__()
        self.unused = unused

    def leave_SimpleStatementLine(
        self, original_node: cst.SimpleStatementLine, updated_node: cst.SimpleStatementLine
    ) -> cst.SimpleStatementLine | cst.RemovalSentinel:
        (statement, *others) = updated_node.body
        if others or not isinstance(statement, cst.Import | cst.ImportFrom):
            return updated_node
        if isinstance(statement.names, cst.ImportStar):
            return updated_node
        bound = [given or name.partition(".")[0] for name, given, _ in _imports(statement)]
        kept = [alias for alias, name in zip(statement.names, bound) if name not in self.unused]
        if len(kept) == len(bound):
            return updated_node
        if not kept:
            return cst.RemoveFromParent()
        kept[-1] = kept[-1].with_changes(comma=cst.MaybeSentinel.DEFAULT)
        return updated_node.with_changes(body=[statement.with_changes(names=kept)])


def without_unused(old: str, new: str) -> str:
    """The new script without imports that only the old one used."""
    return _without_imports(new, set(names_used(old)) - set(names_used(new)))
