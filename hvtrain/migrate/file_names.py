"""The pass that gives files of weights and models the suffix that Keras 3 demands."""

from collections.abc import Iterator

import libcst as cst
import libcst.matchers as m

from hvtrain.migrate.parsing import Pass, argument, dotted

WEIGHTS, MODEL = ".weights.h5", ".keras"
_OLD = (".weights.h5", ".keras", ".hdf5", ".h5", ".ckpt", ".tf")
_READ = ("load_weights", "load_model", "exists", "isfile")


class Literals(Pass):
    """Finds the string literals of file names, also those behind a variable or a command-line option."""

    def __init__(self) -> None:
        super().__init__()
        self.values: dict[str, list[cst.BaseExpression]] = {}
        self.written: list[tuple[cst.Call, cst.BaseExpression, str]] = []
        self.read: list[cst.BaseExpression] = []

    def visit_Assign(self, node: cst.Assign) -> None:
        self.values.setdefault(dotted(node.targets[0].target), []).append(node.value)

    def visit_Call(self, node: cst.Call) -> None:
        name, method = self.imported(node.func), _method(node)
        default = argument(node, "default")
        if method == "add_argument" and default and isinstance(node.args[0].value, cst.SimpleString):
            option = node.args[0].value.raw_value.lstrip("-").replace("-", "_")
            self.values.setdefault(f"args.{option}", []).append(default.value)
        if suffix := _suffix(node, name, method):
            path = argument(node, "filepath", 1 if name.endswith("save_model") else 0)
            if path:
                self.written.append((node, path.value, suffix))
        elif method in _READ and node.args:
            self.read.append(node.args[0].value)

    def literals(self, node: cst.BaseExpression) -> list[cst.BaseExpression]:
        """The string literals that a path ends in; empty if they are not in the script."""
        if isinstance(node, cst.SimpleString):
            return [node]
        if isinstance(node, cst.FormattedString) and isinstance(node.parts[-1], cst.FormattedStringText):
            return [node.parts[-1]]
        if isinstance(node, cst.BinaryOperation):
            return self.literals(node.left if isinstance(node.operator, cst.Modulo) else node.right)
        if isinstance(node, cst.Call) and _method(node) == "format":
            return self.literals(node.func.value)
        if (
            isinstance(node, cst.Call)
            and (_method(node) == "join" or dotted(node.func) in ("str", "Path"))
            and node.args
        ):
            return self.literals(node.args[-1].value)
        values = self.values.get(dotted(node) or "?", [])
        return [literal for value in values for literal in self.literals(value)] if len(values) == 1 else []


class FileNames(Pass):
    """Renames the literals that `found` holds, and other strings that are the same name."""

    def __init__(self, found: Literals) -> None:
        super().__init__()
        self.nodes: dict[cst.CSTNode, str] = {}
        self.texts: dict[str, str] = {}
        for _, path, suffix in found.written:
            for literal in found.literals(path):
                self._rename(literal, suffix)
        for path in found.read:
            for literal in found.literals(path):
                if (text := _text(literal)) in self.texts:
                    self.nodes[literal] = self.texts[text]

    def _rename(self, literal: cst.CSTNode, suffix: str) -> None:
        text = _text(literal)
        if (new := named(text, suffix)) != text:
            self.nodes[literal] = self.texts[text] = new

    def leave_SimpleString(self, original_node: cst.SimpleString, updated_node: cst.SimpleString) -> cst.SimpleString:
        text = original_node.raw_value
        new = self.nodes.get(original_node) or (self.texts.get(text) if "." in text else None)
        if new is None:
            return updated_node
        quote = updated_node.quote
        return updated_node.with_changes(value=f"{updated_node.prefix}{quote}{new}{quote}")

    def leave_FormattedStringText(
        self, original_node: cst.FormattedStringText, updated_node: cst.FormattedStringText
    ) -> cst.FormattedStringText:
        new = self.nodes.get(original_node) or self.texts.get(original_node.value)
        return updated_node.with_changes(value=new) if new else updated_node


def named(text: str, suffix: str) -> str:
    """The name with the suffix that Keras demands.

    >>> named("w-{epoch}.h5", WEIGHTS), named("saved", MODEL), named("old.h5", MODEL)
    ('w-{epoch}.weights.h5', 'saved.keras', 'old.h5')
    """
    if text.endswith((suffix, ".h5", ".hdf5") if suffix == MODEL else suffix):
        return text
    old = next((ending for ending in _OLD if text.endswith(ending)), "")
    return text.removesuffix(old) + suffix


def unresolved(found: Literals) -> Iterator[tuple[cst.Call, str]]:
    """Calls that write a file whose name is not in the script, and the suffix that it needs."""
    for call, path, suffix in found.written:
        if not found.literals(path) and suffix == WEIGHTS:
            yield call, suffix


def _text(node: cst.CSTNode) -> str:
    return node.raw_value if isinstance(node, cst.SimpleString) else node.value


def _method(node: cst.Call) -> str:
    return node.func.attr.value if isinstance(node.func, cst.Attribute) else ""


def _suffix(call: cst.Call, name: str, method: str) -> str:
    """The suffix of the file that this call writes; empty if it writes none."""
    if name.startswith("keras.callbacks.ModelCheckpoint"):
        only_weights = argument(call, "save_weights_only", 3)
        return WEIGHTS if only_weights and m.matches(only_weights.value, m.Name("True")) else MODEL
    if name in ("keras.models.save_model", "keras.saving.save_model"):
        return MODEL
    if name:
        return ""
    receiver = dotted(call.func.value).lower() if isinstance(call.func, cst.Attribute) else ""
    if method == "save_weights":
        return WEIGHTS
    is_model = receiver.endswith(("model", "net", "network"))
    export = m.Arg(keyword=m.Name("save_format"), value=m.SimpleString())
    return MODEL if method == "save" and is_model and not any(m.matches(arg, export) for arg in call.args) else ""
