"""The pass that gives weights and model files the suffix that Keras 3 demands."""

import re

import libcst as cst
import libcst.matchers as m
from libcst import BaseExpression, Call, CSTNode, FormattedStringText, SimpleString

from hvtrain.migrate.parsing import Names, Pass, argument, code_of, dotted, is_model_name, method_of

WEIGHTS = ".weights.h5"
MODEL = ".keras"
_OLD_SUFFIX = re.compile(r"(\.weights\.h5|\.keras|\.hdf5|\.h5|\.ckpt|\.tf)?/*\Z")
_READERS = ("load_weights", "load_model", "exists", "isfile")


class FilePaths(Names, cst.CSTVisitor):
    """Finds the paths of weights and model files, and the string literals that these end in.

    Attributes:
        values: The expressions assigned to each name; for `args.NAME`, an option's default.
        written: Calls that write a file, each with its path and the suffix that Keras demands.
        read: Calls that read a file, each with its path.
    """

    def __init__(self) -> None:
        super().__init__()
        self.values: dict[str, list[BaseExpression]] = {}
        self.written: list[tuple[Call, BaseExpression, str]] = []
        self.read: list[tuple[Call, BaseExpression]] = []

    def visit_Assign(self, node: cst.Assign) -> None:
        self.values.setdefault(code_of(node.targets[0].target), []).append(node.value)

    def visit_Call(self, node: Call) -> None:
        name = self.called(node)
        method = method_of(node)
        default = argument(node, "default")
        # The default in parser.add_argument("--weights", default="w.h5") is used as args.weights.
        if method == "add_argument" and default and isinstance(node.args[0].value, SimpleString):
            option = node.args[0].value.raw_value.lstrip("-").replace("-", "_")
            self.values.setdefault(f"args.{option}", []).append(default.value)

        suffix = _required_suffix(node, name, method)
        if suffix:
            # save_model(model, path), model.save(path)
            path = argument(node, "filepath", 1 if name.endswith("save_model") else 0)
            if path:
                self.written.append((node, path.value, suffix))
        elif (method or name.rpartition(".")[2]) in _READERS and node.args:
            self.read.append((node, node.args[0].value))

    def literals(
        self, node: BaseExpression, seen: frozenset[str] = frozenset()
    ) -> list[BaseExpression]:
        """Returns the string literals that a path ends in; empty if they are not in the script.

        Args:
            node: The path.
            seen: Names followed so far, so that path = Path(path) does not recurse forever.
        """
        if isinstance(node, SimpleString):
            return [node]
        # f"w-{epoch}.h5": the suffix is in the last part.
        if m.matches(node, m.FormattedString([m.ZeroOrMore(), m.FormattedStringText()])):
            return [node.parts[-1]]
        if isinstance(node, cst.BinaryOperation):
            # "name-%d.h5" % step, or folder + "name.h5" and folder / "name.h5"
            is_format = isinstance(node.operator, cst.Modulo)
            return self.literals(node.left if is_format else node.right, seen)
        if isinstance(node, Call):
            if method_of(node) == "format":
                return self.literals(node.func.value, seen)
            # os.path.join(folder, "w.h5"), Path("w.h5")
            if node.args and (method_of(node) == "join" or dotted(node.func) in ("str", "Path")):
                return self.literals(node.args[-1].value, seen)

        # A name that is assigned several times may hold any of the values, so it is not followed.
        name = dotted(node) or "?"
        values = self.values.get(name, [])
        if len(values) != 1 or name in seen:
            return []
        return self.literals(values[0], seen | {name})


class FileNames(Pass):
    """Renames the files that the script writes, in their literals and in other strings with the same text.

    Attributes:
        new_by_node: The new text of each literal to rename.
        new_by_text: The new text for each old text.
    """

    def __init__(self, paths: FilePaths) -> None:
        super().__init__()
        self.new_by_node: dict[CSTNode, str] = {}
        self.new_by_text: dict[str, str] = {}
        for _, path, suffix in paths.written:
            for literal in paths.literals(path):
                text = _text(literal)
                new = with_suffix(text, suffix)
                if new != text:
                    self.new_by_node[literal] = new
                    self.new_by_text[text] = new

        # Renames only files that this script writes: others hold weights of Keras 2 and keep their
        # names.
        for _, path in paths.read:
            for literal in paths.literals(path):
                text = _text(literal)
                if text in self.new_by_text:
                    self.new_by_node[literal] = self.new_by_text[text]

    def leave_SimpleString(
        self, original_node: SimpleString, updated_node: SimpleString
    ) -> SimpleString:
        quote = updated_node.quote
        return updated_node.with_changes(
            value=f"{updated_node.prefix}{quote}{self._new_text(original_node)}{quote}"
        )

    def leave_FormattedStringText(
        self, original_node: FormattedStringText, updated_node: FormattedStringText
    ) -> FormattedStringText:
        return updated_node.with_changes(value=self._new_text(original_node))

    def _new_text(self, node: CSTNode) -> str:
        """Returns the text of a literal, renamed if it is the name of a written file."""
        text = _text(node)
        # Text without a dot, such as "model", may mean something else in another literal.
        default = self.new_by_text.get(text, text) if "." in text else text
        return self.new_by_node.get(node, default)


def with_suffix(text: str, suffix: str) -> str:
    """Returns a file name with the suffix that Keras demands.

    >>> with_suffix("w-{epoch}.h5", WEIGHTS), with_suffix("saved/", MODEL), with_suffix("old.h5", MODEL)
    ('w-{epoch}.weights.h5', 'saved.keras', 'old.h5')
    """
    # Keras 3 still writes a whole model as HDF5, but ModelCheckpoint refuses .hdf5.
    allowed = (suffix, ".h5") if suffix == MODEL else (suffix,)
    if text.endswith(allowed):
        return text

    return _OLD_SUFFIX.sub(suffix, text, count=1)


def outdated_reads(paths: FilePaths) -> list[Call]:
    """Returns calls that read weights under an old suffix, although the script writes such files with the new one."""
    written = {
        _stem(literal)
        for _, path, suffix in paths.written
        for literal in paths.literals(path)
        if suffix == WEIGHTS
    }
    calls = []
    for call, path in paths.read:
        if method_of(call) != "load_weights":
            continue
        for literal in paths.literals(path):
            stem = _stem(literal)
            is_old = re.search(r"(?<!\.weights)\.h5$|\.hdf5$", _text(literal))
            if is_old and any(_may_be_same_path(name, stem) for name in written):
                calls.append(call)

    return calls


def _stem(literal: CSTNode) -> str:
    """Returns the part of a file name before its numbers, the same for w-10.h5, w-{epoch}.weights.h5 and w-%d.h5."""
    name = _text(literal).removesuffix(WEIGHTS)
    return re.split(r"[{%\d]|\.h5$|\.hdf5$", name)[0].rstrip(".-_")


def _may_be_same_path(first: str, second: str) -> bool:
    """True if two paths may be the same: one of them may lack folders, as in os.path.join(folder, "w.h5")."""
    parts = zip(reversed(first.strip("/").split("/")), reversed(second.split("/")))
    return all(part == other for part, other in parts)


def _text(node: CSTNode) -> str:
    if isinstance(node, SimpleString):
        return node.raw_value
    return node.value


def _required_suffix(call: Call, name: str, method: str) -> str:
    """Returns the suffix that Keras 3 demands of the file this call writes; empty if it writes none."""
    if name.startswith("keras.callbacks.ModelCheckpoint"):
        only_weights = argument(call, "save_weights_only", 4)
        if only_weights and m.matches(only_weights.value, m.Name("True")):
            return WEIGHTS
        return MODEL

    if name in ("keras.models.save_model", "keras.saving.save_model"):
        return MODEL
    if name:
        return ""

    if method == "save_weights":
        return WEIGHTS

    # With save_format=, the suffix does not decide the format; undecided.py reports such calls.
    has_format = m.Arg(keyword=m.Name("save_format"), value=m.SimpleString())
    # Images and other objects have a save() too.
    is_model = method == "save" and is_model_name(call.func.value)
    if is_model and not any(m.matches(arg, has_format) for arg in call.args):
        return MODEL
    return ""
