"""The pass that renames imports and imported names for Keras 3."""

import re
from collections import defaultdict
from collections.abc import Iterator

import libcst as cst
import libcst.matchers as m
from libcst import Attribute, BaseExpression, Import, ImportFrom, parse_expression
from libcst.codemod import CodemodContext
from libcst.codemod.visitors import RemoveImportsVisitor

from hvtrain.migrate.parsing import (
    HVTRAIN,
    Imported,
    Pass,
    apply,
    code_of,
    dotted,
    imports,
    imports_in,
    names_used,
)
from hvtrain.migrate.tables import new_name

_RELATED_MODULE = re.compile(r"(tensorflow|tf_keras|keras|horovod|hvtrain)\b")
# For names that none of the script's imports provides: the prefix to
# write, and the import that it needs.
_FALLBACKS = {
    "tensorflow": ("tf", "import tensorflow as tf"),
    "keras": ("keras", "import keras"),
    HVTRAIN: (HVTRAIN, f"import {HVTRAIN}"),
}


def rename(text: str, keeps_horovod: bool) -> str:
    """Returns the script with its imports and imported names renamed for Keras 3.

    Args:
        text: The script.
        keeps_horovod: True to keep names of horovod.tensorflow (not of its keras module), which graph mode needs.
    """
    names = _Names(keeps_horovod)
    new = apply(text, names)
    # In reverse order, since each line is added above the one before.
    for line in sorted(names.missing, reverse=True):
        new = with_import(new, line)

    return without_unused_imports(text, new)


class _Names(Pass):
    """Renames imports and their uses; `missing` collects the imports that the new names need."""

    def __init__(self, keeps_horovod: bool) -> None:
        super().__init__()
        self.keeps_horovod = keeps_horovod
        self.missing: set[str] = set()

    def visit_Attribute(self, node: Attribute) -> bool:
        return not dotted(node)  # A dotted name is renamed as a whole.

    def leave_Attribute(self, original_node: Attribute, updated_node: Attribute) -> BaseExpression:
        """Renames a dotted name, unless renaming its import is enough."""
        name = self.imported(original_node)
        # The first name, which an import has bound: `tf` in tf.keras.layers.Dense.
        base = original_node
        while isinstance(base, Attribute):
            base = base.value

        imported = self.imported(base)
        if not name or not imported:
            return updated_node

        new = self._new_name(name)
        # `import a.b` binds `a`, which keeps its name; after any other import the
        # name stands for the new module.
        bound = imported if dotted(base) == imported else self._new_name(imported)
        if new == bound + name[len(imported) :]:
            return updated_node

        # The old import reaches the new name: hvd.keras.callbacks becomes hvd.callbacks.
        if new.startswith(f"{bound}."):
            return parse_expression(dotted(base) + new[len(bound) :])
        # Otherwise it needs another import: tf.keras.Input becomes keras.Input.
        for module, (written, line) in _FALLBACKS.items():
            if new.startswith(f"{module}."):
                self.missing.add(line)
                return parse_expression(written + new[len(module) :])
        return parse_expression(new)

    def leave_Name(self, original_node: cst.Name, updated_node: cst.Name) -> BaseExpression:
        """Renames a class or function that was imported under its own name."""
        name = self.imported(original_node)
        if name == original_node.value or name.rpartition(".")[2] != original_node.value:
            return updated_node

        new = self._new_name(name)
        # Some names of Keras 2 have become strings, such as losses.Reduction.SUM.
        if new.startswith('"'):
            return parse_expression(new)
        return parse_expression(new.rpartition(".")[2])

    def visit_Import(self, node: Import | ImportFrom) -> bool:
        # leave_SimpleStatementLine renames the whole statement.
        return False

    visit_ImportFrom = visit_Import

    def leave_SimpleStatementLine(
        self, original_node: cst.SimpleStatementLine, updated_node: cst.SimpleStatementLine
    ) -> cst.SimpleStatementLine | cst.FlattenSentinel:
        """Renames an import, which may become several if its names have moved to different modules."""
        # Several statements on one line are left alone: they are rare, and would lose their layout.
        statement, *others = original_node.body
        if others or not isinstance(statement, Import | ImportFrom):
            return updated_node

        imported = imports(statement)
        new_names = [self._new_name(item.name) for item in imported]
        if new_names == [item.name for item in imported]:
            return updated_node

        statements = [
            cst.parse_statement(line)
            for line in _lines(imported, new_names, isinstance(statement, Import))
        ]
        # In parentheses, each name may have a line and a comment of its own, which are kept.
        if len(statements) == 1 and isinstance(statement, ImportFrom) and "(" in code_of(statement):
            statements = [updated_node.with_changes(body=[_keep_layout(statement, statements[0])])]
        else:
            statements[-1] = statements[-1].with_changes(
                trailing_whitespace=original_node.trailing_whitespace
            )

        statements[0] = statements[0].with_changes(leading_lines=original_node.leading_lines)
        return cst.FlattenSentinel(statements)

    def _new_name(self, name: str) -> str:
        is_low_level = name.startswith("horovod.tensorflow") and not name.startswith(
            "horovod.tensorflow.keras"
        )
        if is_low_level and self.keeps_horovod:
            return name
        return new_name(name)


def _lines(imported: list[Imported], new_names: list[str], is_plain: bool) -> Iterator[str]:
    """Yields import lines that bind the same names from their new modules.

    Args:
        imported: The names of the old statement.
        new_names: Their new full names, in the same order.
        is_plain: True if the old statement was `import a.b`, False if it was `from a import b`.
    """
    groups = defaultdict(list)
    for item, name in zip(imported, new_names):
        if is_plain and not item.alias:
            groups[""].append(name)
            continue

        module, _, last = name.rpartition(".")
        if name == HVTRAIN:  # The usual form is `import hvtrain.keras as hvd`.
            module = ""
            last = HVTRAIN

        # `from a import b` without an alias follows the new name of b; leave_Name renames its uses.
        had_own_name = not is_plain and item.alias == item.name.rpartition(".")[2]
        keeps_own_name = item.alias in ("*", last) or (had_own_name and module)
        groups[module].append(last if keeps_own_name else f"{last} as {item.alias}")

    for module, names in groups.items():
        if module:
            yield f"from {module} import {', '.join(names)}"
        else:
            yield from (f"import {name}" for name in names)


def _keep_layout(old: ImportFrom, new_line: cst.BaseStatement) -> ImportFrom:
    """Returns the old statement, parentheses and comments included, with the new module and names."""
    new = new_line.body[0]
    names = [
        item.with_changes(name=other.name, asname=other.asname)
        for item, other in zip(old.names, new.names)
    ]
    return old.with_changes(module=new.module, names=names)


def with_import(text: str, line: str) -> str:
    """Adds an import line above the first statement with a related import, unless the script has it already."""
    module = cst.parse_module(text)
    related = []
    for index, statement in enumerate(module.body):
        nodes = m.findall(statement, m.Import() | m.ImportFrom())
        if isinstance(statement, cst.SimpleStatementLine) and line in map(code_of, nodes):
            return text
        if any(_RELATED_MODULE.match(item.name) for node in nodes for item in imports(node)):
            related.append(index)

    body = list(module.body)
    old = body[related[0]]
    # The new line gets the comments above the old one.
    new = cst.parse_statement(line, module.config_for_parsing).with_changes(
        leading_lines=old.leading_lines
    )
    body[related[0]] = old.with_changes(leading_lines=[])
    body.insert(related[0], new)
    return module.with_changes(body=body).code


def without_unused_imports(old: str, new: str) -> str:
    """Removes imports from the new script if only the old one used them."""
    unused = names_used(old).keys() - names_used(new).keys()
    module = cst.parse_module(new)
    context = CodemodContext()
    for statement, item in imports_in(module):
        source, _, last = item.name.rpartition(".")
        if item.bound not in unused:
            continue
        if isinstance(statement, Import):
            RemoveImportsVisitor.remove_unused_import(context, item.name, asname=item.alias or None)
        else:
            alias = None if item.alias == last else item.alias
            RemoveImportsVisitor.remove_unused_import(context, source, last, alias)

    return RemoveImportsVisitor(context).transform_module(module).code
