"""The pass that replaces the statements that gave each rank its GPU by hvd.pin_gpu()."""

import re
from collections.abc import Sequence

import libcst as cst
import libcst.matchers as m

from hvtrain.migrate.parsing import Pass, code_of, names_used

# tf.config.experimental.set_memory_growth(gpu, True)
_CALL = re.compile(r"[\w.]*\b(set_memory_growth|set_visible_devices|set_session)\(.*\)", re.DOTALL)
# gpus = tf.config.list_physical_devices("GPU"), config = tf.compat.v1.ConfigProto()
_VALUE = re.compile(r"[\w.]*\b(list_physical_devices|ConfigProto|GPUOptions|Session)\(.*\)", re.DOTALL)
# config.gpu_options.visible_device_list = ..., os.environ["CUDA_VISIBLE_DEVICES"] = ...
_TARGET = re.compile(r"\w+\.gpu_options\.\w+|os\.environ\[.CUDA_VISIBLE_DEVICES.\]")


class Pinning(Pass):
    """Replaces pinning by hand.

    Args:
        text: The script.
        alias: Its name for Horovod.
    """

    def __init__(self, text: str, alias: str) -> None:
        super().__init__()
        self.used = names_used(text)
        argument = "by_local_rank=True" if f"{alias}.elastic" in text else ""
        self.line = f"{alias}.pin_gpu({argument})"

    def visit_If(self, node: cst.If | cst.For | cst.Try) -> bool:
        # Where a whole statement pins, nothing inside it is looked at.
        return not _pins(node)

    visit_For = visit_If
    visit_Try = visit_If

    def leave_Module(self, original_node: cst.Module, updated_node: cst.Module) -> cst.Module:
        return updated_node.with_changes(body=self._pinned(updated_node.body))

    def leave_IndentedBlock(
        self, original_node: cst.IndentedBlock, updated_node: cst.IndentedBlock
    ) -> cst.IndentedBlock:
        return updated_node.with_changes(body=self._pinned(updated_node.body))

    def _pinned(self, body: Sequence[cst.BaseStatement]) -> Sequence[cst.BaseStatement]:
        """The statements, with one call in place of those that pin."""
        by_hand = [statement for statement in body if _pins(statement)]
        # Without the local rank a statement does something else, such as letting memory grow.
        by_rank = [statement for statement in by_hand if "local_rank" in code_of(statement)]
        if not by_rank or self._is_used_elsewhere(by_hand):
            return body

        call = cst.parse_statement(self.line).with_changes(leading_lines=by_hand[0].leading_lines)

        new_body = []
        for statement in body:
            if statement is by_rank[0]:
                new_body.append(call)
            elif statement not in by_hand:
                new_body.append(statement)

        return new_body

    def _is_used_elsewhere(self, statements: list[cst.BaseStatement]) -> bool:
        """True if other statements use what these assign, such as a session's config."""
        here = names_used("".join(code_of(statement) for statement in statements))

        assigned = {
            name.value
            for statement in statements
            for target in m.findall(statement, m.AssignTarget(target=m.Name()))
            for name in m.findall(target, m.Name())
        }
        return any(self.used[name] > here[name] for name in assigned)


def _pins(statement: cst.BaseStatement) -> bool:
    """True if the statement does nothing but choose GPUs."""
    if isinstance(statement, cst.SimpleStatementLine):
        return all(_is_pinning(part) for part in statement.body)
    if not isinstance(statement, cst.For | cst.If | cst.Try):
        return False

    inner: list[cst.BaseStatement] = list(statement.body.body)
    orelse = getattr(statement, "orelse", None)
    if isinstance(orelse, cst.If):  # an elif
        return False
    if isinstance(statement, cst.If | cst.For) and orelse:
        inner += orelse.body.body
    return all(map(_pins, inner))


def _is_pinning(part: cst.BaseSmallStatement) -> bool:
    """True for a call, or an assignment, that only chooses GPUs."""
    if isinstance(part, cst.Expr):
        return bool(_CALL.fullmatch(code_of(part)))
    if not isinstance(part, cst.Assign):
        return False

    target = code_of(part.targets[0].target)
    # CUDA_VISIBLE_DEVICES may also be set to hide all GPUs.
    if target.startswith("os.environ"):
        return bool(_TARGET.fullmatch(target)) and "local_rank" in code_of(part.value)
    return bool(_TARGET.fullmatch(target) or _VALUE.fullmatch(code_of(part.value)))
